-- Forget all that can be found, unless a block is in use: num_blocks.

local refusal = enter()
if refusal then return refusal end
if num_free() < tonumber(ARGV[6]) then return reply("in use") end
local version = next_version()
in_parts("RPUSH", PLAIN, redis.call("ZRANGE", CACHED, 0, -1))
redis.call("DEL", CACHED, SEALED, HOLDERS)
return done(version)
