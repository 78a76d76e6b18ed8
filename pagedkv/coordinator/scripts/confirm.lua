-- The copies of this worker are done: their sources lose the owner that was kept for them.

COPIED = "0"                                      -- it is the call itself here
local refusal = enter()
if refusal then return refusal end
local sources = copies_done()
local damage = too_few(sources)
if damage then return damage end
local version, freed = next_version(), release(sources)
redis.call("HDEL", COPYING, TOKEN)
return done(version, pack(freed), pack({num_free()}))
