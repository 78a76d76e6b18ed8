-- Join a pool, or make it: generation (if it is made), num_blocks, block_size, max_length, prefix_cache, namespace,
-- length of the lease in microseconds. A setting that is "" is whatever the pool says.

local NAMES = {"num_blocks", "block_size", "max_length", "prefix_cache", "namespace"}
local settings, lease = slice(ARGV, 6, 10), ARGV[11]

local function of_the_pool()                      -- its settings; or the refusal if it is not ours
  local found = redis.call("HMGET", POOL, "format", unpack(NAMES))
  if found[1] ~= "1" then return nil, reply("format", tostring(found[1] or "none")) end
  for i, name in ipairs(NAMES) do
    if settings[i] ~= "" and settings[i] ~= found[i + 1] then return nil, reply("differs", name, found[i + 1]) end
  end
  return slice(found, 2, 6)
end

local function make()                             -- a new pool: whatever is left of another one goes
  if settings[1] == "" or settings[2] == "" then return nil, reply("absent") end
  redis.call("DEL", unpack(KEYS))
  for i, other in ipairs({"", "", "none", "0", "x"}) do
    if settings[i] == "" then settings[i] = other end
  end
  redis.call("HSET", POOL, "format", 1, "generation", GENERATION, "changes", 0, "next_id", 0, "tokens", 0)
  for i, name in ipairs(NAMES) do redis.call("HSET", POOL, name, settings[i]) end
  local blocks = {}
  for block = 0, tonumber(settings[1]) - 1 do blocks[#blocks + 1] = block end
  in_parts("RPUSH", PLAIN, blocks)
  return settings
end

local found, refusal
if redis.call("EXISTS", POOL) == 1 then found, refusal = of_the_pool() else found, refusal = make() end
if refusal then return refusal end
local token = redis.call("HINCRBY", POOL, "tokens", 1)
redis.call("HSET", WORKERS, WORKER, table.concat({whole(token), whole(now() + tonumber(lease)), lease, "0 "}, " "))
reclaim()                                         -- the lease of an earlier worker of this name is over by that
return reply("ok", redis.call("HGET", POOL, "generation"), tostring(token), unpack(found))
