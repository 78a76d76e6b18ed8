-- Children that share all blocks of a parent: its id, then theirs ("": the next unused number).

local refusal = enter()
if refusal then return refusal end
local seqs, unknown = own({ARGV[6]})
if unknown then return unknown end
local ids, in_use, numbers, next_id = new_ids(slice(ARGV, 7, #ARGV))
if in_use then return in_use end
local shared = redis.call("HGET", TABLES, ARGV[6]) or ""
local blocks = owned(unpacked(shared))
look_up(blocks)
local version, texts, tables = next_version(), {}, {}
for _, block in ipairs(blocks) do
  if #ids > 0 then gain(block, #ids) end
end
for _, id in ipairs(ids) do
  extend_list(texts, {id, sequence_text(seqs[1].length, seqs[1].tail, version)})
  extend_list(tables, {id, shared})
end
in_parts("HSET", SEQS, texts)
in_parts("HSET", TABLES, tables)
redis.call("HSET", POOL, "next_id", whole(next_id))
return done(version, pack64(numbers))
