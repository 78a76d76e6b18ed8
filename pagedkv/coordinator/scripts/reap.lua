-- Take back what workers hold whose lease has been over for some microseconds. Any client may ask; it happens once.

if redis.call("HGET", POOL, "generation") ~= GENERATION then return reply("lost") end
local time, workers, gone = now(), redis.call("HGETALL", WORKERS), {}
for i = 1, #workers, 2 do
  local ends = string.match(workers[i + 1], "^%d+ (%d+)")
  if tonumber(ends) + tonumber(ARGV[6]) < time then gone[#gone + 1] = workers[i] end
end
table.sort(gone)
in_parts("HDEL", WORKERS, gone)
local ids, freed = reclaim()
local sections = {"ok", pack64({next_version()}), pack(freed), pack({num_free()}), tostring(#gone)}
extend_list(sections, gone)
extend_list(sections, ids)
return joined(sections)
