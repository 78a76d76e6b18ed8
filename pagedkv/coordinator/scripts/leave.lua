-- End the lease; what the worker still holds is taken back.

if redis.call("HGET", POOL, "generation") ~= GENERATION then return reply("lost") end
if lease_of(WORKER) == tonumber(TOKEN) then redis.call("HDEL", WORKERS, WORKER) end
local version, ids, freed = next_version(), reclaim()
return reply("ok", pack64({version}), pack(freed), pack({num_free()}))
