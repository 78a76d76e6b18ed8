-- The usual step of decoding; it stands before extend.lua and has its arguments. One token for each id, in a last
-- block that nobody shares or in a plain new one: where there is more to it, this does nothing, and the rest decides.

local function step()
  local ids = #ARGV - 10
  if ARGV[9] ~= "1" or COPIED == "1" or ids > MANY / 2 or fenced() then return end
  if tonumber(string.match(last, "^%d+")) + 1 ~= tonumber(REQUEST) then return end
  local size, limit = tonumber(ARGV[7]), tonumber(ARGV[8]) or math.huge
  local lengths, tails, growing, in_place = {}, {}, {}, {}
  for i, text in ipairs(redis.call("HMGET", SEQS, unpack(ARGV, 11))) do
    local token, length, tail = string.match(text or "", "^(%d+) (%d+) (%-?%d+)")
    if token ~= TOKEN or length + 1 > limit then return end
    lengths[i], tails[i] = length + 1, tail
    if length % size == 0 then growing[#growing + 1] = i else in_place[#in_place + 1] = tail end
  end
  if #in_place > 0 then
    for _, count in ipairs(redis.call("HMGET", OWNERS, unpack(in_place))) do
      if count ~= "1" then return end
    end
    for _, digest in ipairs(redis.call("HMGET", SEALED, unpack(in_place))) do
      if digest then return end
    end
  end
  if #growing > 0 and redis.call("LLEN", PLAIN) < #growing then return end

  local version, new, seqs = redis.call("HINCRBY", POOL, "changes", 1), {}, {}
  if #growing > 0 then
    local keys, rows, counts = {}, {}, {}
    new = redis.call("LPOP", PLAIN, #growing)
    for j, i in ipairs(growing) do keys[j], tails[i] = ARGV[10 + i], new[j] end
    for j, row in ipairs(redis.call("HMGET", TABLES, unpack(keys))) do
      rows[2 * j - 1], rows[2 * j] = keys[j], (row or "") .. word(new[j])
      counts[2 * j - 1], counts[2 * j] = new[j], 1
    end
    redis.call("HSET", TABLES, unpack(rows))
    redis.call("HSET", OWNERS, unpack(counts))
  end
  for i, length in ipairs(lengths) do
    seqs[2 * i - 1] = ARGV[10 + i]
    seqs[2 * i] = string.format("%s %.0f %s %.0f", TOKEN, length, tails[i], version)
  end
  redis.call("HSET", SEQS, unpack(seqs))
  local answer = {"ok", pack64({version}), pack(new)}
  if ARGV[6] == "tell" then answer[4] = pack({redis.call("LLEN", PLAIN) + redis.call("ZCARD", CACHED)}) end
  answer = joined(answer)
  last = REQUEST .. " " .. answer
  renew()
  return answer
end

if ARGV[6] == "run" or ARGV[6] == "tell" then
  local answer = step()
  if answer then return answer end
end
