-- What was handed over to this worker: ids, or none for all of it. Replies with id and parcel of each.

local refusal = enter()
if refusal then return refusal end
local ids = slice(ARGV, 6, #ARGV)
if #ids == 0 then
  ids = redis.call("HKEYS", PARCELS)
  table.sort(ids)
  local mine = {}
  for i, text in ipairs(in_parts("HMGET", SEQS, ids)) do
    if sequence(text).token == tonumber(TOKEN) then mine[#mine + 1] = ids[i] end
  end
  ids = mine
end
local seqs, unknown = own(ids)
if unknown then return unknown end
local parcels, sections = in_parts("HMGET", PARCELS, ids), {}
for i, id in ipairs(ids) do
  if not parcels[i] then return reply("unknown", tostring(i - 1)) end
  extend_list(sections, {id, parcels[i]})
end
local version, texts = next_version(), {}
for i, id in ipairs(ids) do
  extend_list(texts, {id, sequence_text(seqs[i].length, seqs[i].tail, version)})
end
in_parts("HSET", SEQS, texts)
in_parts("HDEL", PARCELS, ids)
return done(version, joined(sections))
