-- Forget sequences: their ids.

local refusal = enter()
if refusal then return refusal end
local ids = slice(ARGV, 6, #ARGV)
local seqs, unknown = own(ids)
if unknown then return unknown end
local blocks = {}
for _, entries in ipairs(tables_of(ids)) do extend_list(blocks, owned(entries)) end
local damage = too_few(blocks)
if damage then return damage end
in_parts("HDEL", SEQS, ids)                       -- first, since a server without memory allows it, and then the rest
in_parts("HDEL", TABLES, ids)
local version, freed = next_version(), release(blocks)
return done(version, pack(freed), pack({num_free()}))
