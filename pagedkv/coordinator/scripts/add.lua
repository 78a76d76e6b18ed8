-- Register an empty sequence: its id, or "" for the next unused number.

local refusal = enter()
if refusal then return refusal end
local ids, in_use, numbers, next_id = new_ids({ARGV[6]})
if in_use then return in_use end
local version = next_version()
redis.call("HSET", POOL, "next_id", whole(next_id))
redis.call("HSET", SEQS, ids[1], sequence_text(0, -1, version))
return done(version, pack64(numbers))
