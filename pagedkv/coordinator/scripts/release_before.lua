-- Give up the first entries of a table: the id, how many.

local refusal = enter()
if refusal then return refusal end
local id, count = ARGV[6], tonumber(ARGV[7])
local seqs, unknown = own({id})
if unknown then return unknown end
local entries = tables_of({id})[1]
local left = owned(slice(entries, 1, count))
local damage = too_few(left)
if damage then return damage end
local version, freed = next_version(), release(left)
if #left > 0 then
  for i = 1, count do entries[i] = -1 end
  redis.call("HSET", TABLES, id, pack(entries))
  redis.call("HSET", SEQS, id, sequence_text(seqs[1].length, entries[#entries], version))
end
return done(version, pack(freed), pack({num_free()}))
