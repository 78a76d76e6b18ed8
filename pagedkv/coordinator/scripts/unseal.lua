-- Let blocks be found no more; those that are free become plain ones, behind the others.

local refusal = enter()
if refusal then return refusal end
local version, gone = next_version(), unseal(unpacked(ARGV[6]))
for _, block in ipairs(gone) do
  if redis.call("ZREM", CACHED, block) == 1 then redis.call("RPUSH", PLAIN, block) end
end
return done(version, pack(gone))
