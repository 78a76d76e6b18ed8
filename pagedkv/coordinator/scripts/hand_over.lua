-- Give sequences to another worker: its name, how many, their ids, and for each what the server does not know of it.

local refusal = enter()
if refusal then return refusal end
local count = tonumber(ARGV[7])
local ids = slice(ARGV, 8, 7 + count)
local seqs, unknown = own(ids)
if unknown then return unknown end
local token, ends = lease_of(ARGV[6])
if not token or ends < clock then return reply("nobody") end
local version, texts, parcels = next_version(), {}, {}
for i, id in ipairs(ids) do
  local text = sequence_text(seqs[i].length, seqs[i].tail, version)
  extend_list(texts, {id, token .. string.sub(text, #TOKEN + 1)})
  extend_list(parcels, {id, ARGV[7 + count + i]})
end
in_parts("HSET", SEQS, texts)
in_parts("HSET", PARCELS, parcels)
return done(version)
