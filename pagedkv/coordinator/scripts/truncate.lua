-- Forget the end of a sequence: its id, the length that stays, block_size.

local refusal = enter()
if refusal then return refusal end
local id, length, size = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local seqs, unknown = own({id})
if unknown then return unknown end
local keep, entries = math.ceil(length / size), tables_of({id})[1]
local cut, kept = owned(slice(entries, keep + 1, #entries)), slice(entries, 1, keep)
local damage = too_few(cut)
if damage then return damage end
local version, freed = next_version(), release(cut)
if length < seqs[1].length then
  redis.call("HSET", TABLES, id, pack(kept))
  redis.call("HSET", SEQS, id, sequence_text(length, kept[keep] or -1, version))
  if length % size > 0 then
    look_up({kept[keep]})
    if owners[kept[keep]] == 1 then unseal({kept[keep]}) end
  end
end
return done(version, pack(freed), pack({num_free()}))
