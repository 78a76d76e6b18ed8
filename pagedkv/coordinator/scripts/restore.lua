-- Build sequences of a snapshot: how many owners each of its blocks has, in the order in which they are taken; lengths
-- (pairs of int32); places in the tables and digests of blocks that can be found; ids; a table for each, of places
-- among those blocks.

local refusal = enter()
if refusal then return refusal end
local times, lengths, places, digests = unpacked(ARGV[6]), unpacked(ARGV[7]), unpacked(ARGV[8]), pieces(ARGV[9], DIGEST)
local count = #lengths / 2
local ids, in_use, _, next_id = new_ids(slice(ARGV, 10, 9 + count))
if in_use then return in_use end
local available = num_free()
if #times > available then return reply("exhausted", tostring(#times), tostring(available)) end
local version, texts, rows = next_version(), {}, {}
local taken, evicted = take(#times)
for i, block in ipairs(taken) do owners[block] = times[i] end
for i, id in ipairs(ids) do
  local entries = unpacked(ARGV[9 + count + i])
  for j, place in ipairs(entries) do entries[j] = place < 0 and -1 or taken[place + 1] end
  local length = lengths[2 * i - 1] % 4294967296 + lengths[2 * i] * 4294967296
  extend_list(texts, {id, sequence_text(length, entries[#entries] or -1, version)})
  extend_list(rows, {id, pack(entries)})
end
in_parts("HSET", SEQS, texts)
in_parts("HSET", TABLES, rows)
local blocks = {}
for i, place in ipairs(places) do blocks[i] = taken[place + 1] end
seal(blocks, digests)
return done(version, pack(taken), pack(evicted), pack({available - #times}))
