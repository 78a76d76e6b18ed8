-- Let full, final blocks be found: the blocks, their digests.

local refusal = enter()
if refusal then return refusal end
local blocks, digests = unpacked(ARGV[6]), pieces(ARGV[7], DIGEST)
for i, other in ipairs(in_parts("HMGET", SEALED, blocks)) do
  if other and other ~= digests[i] then return reply("other", tostring(i - 1)) end
end
local version = next_version()
return done(version, pack(seal(blocks, digests)))
