-- Rows that continue others: parents (row numbers from 0), then the ids.

local refusal = enter()
if refusal then return refusal end
local parents, ids = unpacked(ARGV[6]), slice(ARGV, 7, #ARGV)
local seqs, unknown = own(ids)
if unknown then return unknown end
local tables, kept, dropped, texts, rows = tables_of(ids), {}, {}, {}, {}
for i, parent in ipairs(parents) do
  if parent + 1 ~= i then
    extend_list(kept, owned(tables[parent + 1]))
    extend_list(dropped, owned(tables[i]))
  end
end
look_up(kept)
local damage = too_few(dropped)
if damage then return damage end
local version = next_version()
for _, block in ipairs(kept) do gain(block, 1) end   -- taken before any is dropped
local freed = release(dropped)
for i, parent in ipairs(parents) do
  if parent + 1 ~= i then
    local seq = seqs[parent + 1]
    extend_list(texts, {ids[i], sequence_text(seq.length, seq.tail, version)})
    extend_list(rows, {ids[i], pack(tables[parent + 1])})
  end
end
in_parts("HSET", SEQS, texts)
in_parts("HSET", TABLES, rows)
return done(version, pack(freed), pack({num_free()}))
