-- Room for new tokens of a whole batch, or for none of it: what to do ("match": what would be found; "plan": how many
-- blocks it would take; "run"; "tell": the same, and say what is free then), block_size, max_length, new tokens per
-- sequence (−1: the rest of its prompt; "1": one each, and no prompt begins), lengths of the prompts that begin (0:
-- none), ids, and for each of those prompts the digests of its blocks that may be found.

local mode, size, limit = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]) or math.huge
local tokens, prompts, ids = {}, {}, {}
if ARGV[9] == "1" then
  ids = slice(ARGV, 11, #ARGV)
  for i = 1, #ids do tokens[i], prompts[i] = 1, 0 end
else
  tokens, prompts = unpacked(ARGV[9]), unpacked(ARGV[10])
  ids = slice(ARGV, 11, 10 + #tokens)
end
if mode == "run" or mode == "tell" then
  local refusal = enter()
  if refusal then return refusal end
else
  local refusal = fenced()
  if refusal then return refusal end
end
local seqs, unknown = own(ids)
if unknown then return unknown end

local function find()                             -- per sequence, the cached blocks that begin its prompt
  local found, wanted, place = {}, {}, #ARGV - #ids
  local texts, next_text = {}, 10 + #tokens
  for i = 1, #ids do
    found[i] = {}
    if prompts[i] > 0 then
      next_text = next_text + 1
      texts[i] = pieces(ARGV[next_text], DIGEST)
      extend_list(wanted, texts[i])
    end
  end
  local holders = {}
  for i, held in ipairs(in_parts("HMGET", HOLDERS, wanted)) do holders[wanted[i]] = held end
  for i, text in pairs(texts) do
    for _, digest in ipairs(text) do
      if not holders[digest] then break end
      found[i][#found[i] + 1] = number_at(holders[digest], 1)   -- the oldest of those that hold it
    end
  end
  return found
end

local function entries(length) return math.ceil(length / size) end

local hits = find()
if mode == "match" then return reply("ok", pack({#hits[1]})) end

-- The plan

local start, too_long, beyond = {}, nil, nil
for i, seq in ipairs(seqs) do
  start[i] = seq.length + #hits[i] * size
  if tokens[i] < 0 then tokens[i] = prompts[i] - start[i] end
  if tokens[i] == 0 then hits[i], start[i] = {}, seq.length end
  local after = start[i] + tokens[i]
  if after > limit and not too_long then too_long = reply("long", tostring(i - 1), whole(after)) end
  if tokens[i] > 0 and 0 < prompts[i] and prompts[i] < after and not beyond then
    beyond = reply("beyond", tostring(i - 1), whole(start[i]), whole(tokens[i]))
  end
end
if too_long or beyond then return too_long or beyond end

local attached, gained, revived, tails = {}, {}, {}, {}
for i, seq in ipairs(seqs) do
  extend_list(attached, hits[i])
  if start[i] % size > 0 and tokens[i] > 0 then tails[#tails + 1] = seq.tail end
end
look_up(attached)
look_up(tails)
for _, block in ipairs(attached) do
  if owners[block] == 0 and not gained[block] then revived[#revived + 1] = block end
  gained[block] = (gained[block] or 0) + 1
end

local copies, in_place, gone, new = {}, {}, {}, 0  -- the last owner of a shared block writes in place
for i, seq in ipairs(seqs) do
  if start[i] % size > 0 and tokens[i] > 0 then
    local count = owners[seq.tail] + (gained[seq.tail] or 0)
    copies[i] = count > 1 and count - (gone[seq.tail] or 0) > 1
    if count > 1 then gone[seq.tail] = (gone[seq.tail] or 0) + 1 end
    if copies[i] then new = new + 1 else in_place[#in_place + 1] = seq.tail end
  end
  new = new + entries(start[i] + tokens[i]) - entries(start[i])
end
local needed, available = new + #revived, 0       -- most steps need none, and ask for no more
if needed > 0 or mode ~= "run" then available = num_free() end
if mode == "plan" then return reply("ok", pack({needed, available})) end
if needed > available then return reply("exhausted", tostring(needed), tostring(available)) end

-- Carrying it out

local version = next_version()
for _, block in ipairs(attached) do gain(block, 1) end
in_parts("ZREM", CACHED, revived)                 -- what was found must not be evicted
local taken, evicted = take(new)
unseal(in_place)
local next_taken, fresh, pairs_copied, sources, num_hits = 0, {}, {}, {}, {}
local rows, changed, texts = {}, {}, {}
for i, seq in ipairs(seqs) do
  num_hits[i] = #hits[i]
  local row = {}
  if copies[i] then
    next_taken = next_taken + 1
    row[1] = taken[next_taken]
    sources[#sources + 1] = seq.tail
    extend_list(pairs_copied, {i - 1, seq.tail, row[1]})
  end
  extend_list(row, hits[i])
  for _ = entries(start[i]) + 1, entries(start[i] + tokens[i]) do
    next_taken = next_taken + 1
    row[#row + 1] = taken[next_taken]
    fresh[#fresh + 1] = taken[next_taken]
  end
  if #row > 0 then
    rows[#rows + 1] = {place = i, text = pack(row)}
    changed[#changed + 1] = ids[i]
  end
  if tokens[i] > 0 then
    texts[#texts + 1] = ids[i]
    texts[#texts + 1] = sequence_text(start[i] + tokens[i], row[#row] or seq.tail, version)
  end
end
local written = {}
for i, text in ipairs(in_parts("HMGET", TABLES, changed)) do
  text = text or ""
  if copies[rows[i].place] then text = string.sub(text, 1, -5) end
  extend_list(written, {changed[i], text .. rows[i].text})
end
in_parts("HSET", TABLES, written)
in_parts("HSET", SEQS, texts)
if #sources > 0 then                              -- they keep this owner until the worker has copied them
  redis.call("HSET", COPYING, TOKEN, (redis.call("HGET", COPYING, TOKEN) or "") .. pack(sources))
end
return done(version, pack(fresh), pack({available - needed}), pack64(start), pack64(tokens), pack(num_hits),
  pack(attached), pack(pairs_copied), pack(evicted))
