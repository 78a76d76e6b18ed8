-- Read, changing nothing: "free" counts; "queue"; "owners" of all blocks; "sealed" of some; "workers" and what they hold.

local what = ARGV[6]
if redis.call("HGET", POOL, "generation") ~= GENERATION then return reply("lost") end
if what == "free" then return reply("ok", pack({redis.call("LLEN", PLAIN), redis.call("ZCARD", CACHED)})) end
if what == "queue" then
  local queue = redis.call("LRANGE", PLAIN, 0, -1)
  local cached = redis.call("ZRANGE", CACHED, 0, -1)
  extend_list(queue, cached)
  return reply("ok", pack(queue), pack({#cached}))
end
if what == "owners" then return reply("ok", pack(redis.call("HGETALL", OWNERS))) end
if what == "sealed" then
  local found = {}
  for i, digest in ipairs(in_parts("HMGET", SEALED, unpacked(ARGV[7]))) do found[i] = digest and 1 or 0 end
  return reply("ok", pack(found))
end
local sections = {}
for _, key in ipairs({WORKERS, SEQS, TABLES, COPYING}) do
  local all = redis.call("HGETALL", key)
  sections[#sections + 1] = tostring(#all)
  extend_list(sections, all)
end
return reply("ok", whole(now()), joined(sections))
