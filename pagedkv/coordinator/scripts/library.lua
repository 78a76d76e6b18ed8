-- What the scripts share; it stands before each of them. A script reads all it needs, decides, and only then writes:
-- every refusal comes before the first write. Numbers travel as int32, little-endian, −1 where there is no block.

local POOL, WORKERS, SEQS, TABLES, OWNERS, PLAIN, CACHED, SEALED, HOLDERS, COPYING, PARCELS = unpack(KEYS)
local DIGEST = 32                                 -- bytes of SHA-256
local MANY = 4000                                 -- arguments of one command: Lua's stack has an end

-- Numbers and lists

local function word(n)
  n = n % 4294967296
  return string.char(n % 256, math.floor(n / 256) % 256, math.floor(n / 65536) % 256, math.floor(n / 16777216))
end

local function pack(numbers)
  local words = {}
  for i, n in ipairs(numbers) do words[i] = word(n) end
  return table.concat(words)
end

local function pack64(numbers)
  local words = {}
  for _, n in ipairs(numbers) do
    words[#words + 1] = word(n)
    words[#words + 1] = word(math.floor(n / 4294967296))
  end
  return table.concat(words)
end

local function number_at(text, first)             -- the int32 that begins at this byte
  local a, b, c, d = string.byte(text, first, first + 3)
  local n = a + 256 * b + 65536 * c + 16777216 * d
  return n < 2147483648 and n or n - 4294967296
end

local function unpacked(text)
  local numbers = {}
  for first = 1, #text, 4 do numbers[#numbers + 1] = number_at(text, first) end
  return numbers
end

local function pieces(text, size)
  local found = {}
  for first = 1, #text, size do found[#found + 1] = string.sub(text, first, first + size - 1) end
  return found
end

local function extend_list(list, more)
  for _, item in ipairs(more) do list[#list + 1] = item end
end

local function whole(n) return string.format("%.0f", n) end   -- tostring would write 1e+15

local function slice(list, first, last)
  local part = {}
  for i = first, last do part[#part + 1] = list[i] end
  return part
end

local function in_parts(command, key, arguments)  -- one command, or several of a length that Lua can pass on
  local results = {}
  for first = 1, #arguments, MANY do
    local last = math.min(first + MANY - 1, #arguments)
    local found = redis.call(command, key, unpack(arguments, first, last))
    if type(found) == "table" then extend_list(results, found) end
  end
  return results
end

local function in_reverse(list)
  local turned = {}
  for i = #list, 1, -1 do turned[#turned + 1] = list[i] end
  return turned
end

-- Replies: a status, then sections, each with its length in front

local function joined(sections)
  local parts = {}
  for _, section in ipairs(sections) do
    parts[#parts + 1] = word(#section)
    parts[#parts + 1] = section
  end
  return table.concat(parts)
end

local function reply(...) return joined({...}) end

-- Leases (Burrows 2006, section 2.4): the larger token is right, and the clock is the server's

local function now()                              -- microseconds
  local time = redis.call("TIME")
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function lease_of(name)                     -- token, end and length of a worker's lease, its last reply; or nil
  local token, ends, span, last = string.match(redis.call("HGET", WORKERS, name) or "", "^(%d+) (%d+) (%d+) (.*)$")
  return tonumber(token), tonumber(ends), tonumber(span), last
end

local GENERATION, WORKER, TOKEN, REQUEST, COPIED = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local clock, span, last                           -- now, the length of the caller's lease, its last request and reply

local function fenced()                           -- the refusal of a caller without a valid lease, or nil
  if redis.call("HGET", POOL, "generation") ~= GENERATION then return reply("lost") end
  local token, ends
  token, ends, span, last = lease_of(WORKER)
  if token ~= tonumber(TOKEN) then return reply("fenced", tostring(token or "none")) end
  clock = now()
  if ends < clock then return reply("late", whole(clock - ends)) end
end

local function renew()
  redis.call("HSET", WORKERS, WORKER, table.concat({TOKEN, whole(clock + span), whole(span), last}, " "))
end

-- Blocks: how many own each, the free queue, and which can be found

local owners, touched = {}, {}                    -- counts as far as they are known here; which of them changed

local function look_up(blocks)
  local unknown, seen = {}, {}
  for _, block in ipairs(blocks) do
    if not owners[block] and not seen[block] then
      seen[block] = true
      unknown[#unknown + 1] = block
    end
  end
  for i, count in ipairs(in_parts("HMGET", OWNERS, unknown)) do owners[unknown[i]] = tonumber(count) or 0 end
end

local function gain(block, n)
  owners[block] = owners[block] + n
  touched[block] = true
end

local function write_owners()
  local set, gone = {}, {}
  for block in pairs(touched) do
    if owners[block] > 0 then
      set[#set + 1] = block
      set[#set + 1] = owners[block]
    else
      gone[#gone + 1] = block
    end
  end
  in_parts("HSET", OWNERS, set)
  in_parts("HDEL", OWNERS, gone)
end

local function num_free()
  return redis.call("LLEN", PLAIN) + redis.call("ZCARD", CACHED)
end

local function unseal(blocks)                     -- nobody finds them any more; returns those that could be found
  local gone, digests = {}, {}
  for i, digest in ipairs(in_parts("HMGET", SEALED, blocks)) do
    if digest then
      gone[#gone + 1] = blocks[i]
      digests[#digests + 1] = digest
    end
  end
  local holders = {}
  for i, held in ipairs(in_parts("HMGET", HOLDERS, digests)) do holders[digests[i]] = held end
  for i, block in ipairs(gone) do
    local rest = ""
    for _, other in ipairs(pieces(holders[digests[i]], 4)) do
      if number_at(other, 1) ~= block then rest = rest .. other end
    end
    holders[digests[i]] = rest
  end
  for digest, held in pairs(holders) do
    if held == "" then redis.call("HDEL", HOLDERS, digest) else redis.call("HSET", HOLDERS, digest, held) end
  end
  in_parts("HDEL", SEALED, gone)
  return gone
end

local function seal(blocks, digests)              -- full, final blocks can be found; returns those that are new
  local sealed, here = {}, {}
  for i, other in ipairs(in_parts("HMGET", SEALED, blocks)) do here[blocks[i]] = other end
  for i, block in ipairs(blocks) do
    if not here[block] then
      here[block] = digests[i]
      sealed[#sealed + 1] = block
      redis.call("HSET", SEALED, block, digests[i])
      redis.call("HSET", HOLDERS, digests[i], (redis.call("HGET", HOLDERS, digests[i]) or "") .. word(block))
    end
  end
  return sealed
end

local function take(n)                            -- the front of the queue; returns what was evicted besides
  local taken = {}
  for first = 1, n, MANY do
    local some = redis.call("LPOP", PLAIN, math.min(MANY, n - first + 1))
    for _, block in ipairs(some or {}) do taken[#taken + 1] = tonumber(block) end
  end
  local evicted = {}
  if #taken < n then
    evicted = redis.call("ZRANGE", CACHED, 0, n - #taken - 1)
    in_parts("ZREM", CACHED, evicted)
    for i, block in ipairs(evicted) do evicted[i] = tonumber(block) end
    unseal(evicted)
    extend_list(taken, evicted)
  end
  for _, block in ipairs(taken) do
    owners[block] = 1
    touched[block] = true
  end
  return taken, evicted
end

local function too_few(blocks)                    -- a block that has fewer owners than it would lose, or nil
  look_up(blocks)
  local lost = {}
  for _, block in ipairs(blocks) do
    lost[block] = (lost[block] or 0) + 1
    if lost[block] > owners[block] then return reply("damaged", "block " .. block .. " has an owner too few") end
  end
end

local function release(blocks)                    -- as BlockAllocator.release: returns what became free, in its order
  look_up(blocks)
  for _, block in ipairs(blocks) do gain(block, -1) end
  local freed, seen = {}, {}
  for i = #blocks, 1, -1 do                       -- a block named twice becomes free at the last of them
    if owners[blocks[i]] == 0 and not seen[blocks[i]] then
      seen[blocks[i]] = true
      freed[#freed + 1] = blocks[i]
    end
  end
  freed = in_reverse(freed)
  local plain = {}
  for i, digest in ipairs(in_parts("HMGET", SEALED, freed)) do
    if digest then
      redis.call("ZADD", CACHED, redis.call("HINCRBY", POOL, "cached", 1), freed[i])
    else
      plain[#plain + 1] = freed[i]
    end
  end
  in_parts("LPUSH", PLAIN, in_reverse(plain))
  return freed
end

-- Sequences: owner, length and last block stand apart from the table, so that a step of decoding reads no tables

local function sequence(text)
  local token, length, tail = string.match(text, "^(%d+) (%d+) (%-?%d+)")
  return {token = tonumber(token), length = tonumber(length), tail = tonumber(tail)}
end

local function sequence_text(length, tail, version)
  return TOKEN .. " " .. whole(length) .. " " .. tail .. " " .. whole(version)
end

local function own(ids)                           -- the caller's sequences; or the refusal for one that is not its own
  local found = {}
  for i, text in ipairs(in_parts("HMGET", SEQS, ids)) do
    local seq = text and sequence(text)
    if not seq or seq.token ~= tonumber(TOKEN) then return nil, reply("unknown", tostring(i - 1)) end
    found[i] = seq
  end
  return found
end

local function tables_of(ids)                     -- block ids of each, −1 where a block was left behind
  local found = {}
  for i, text in ipairs(in_parts("HMGET", TABLES, ids)) do found[i] = unpacked(text or "") end
  return found
end

local function owned(entries)                     -- the blocks of a table, in the order in which they are released
  local blocks = {}
  for i = #entries, 1, -1 do
    if entries[i] >= 0 then blocks[#blocks + 1] = entries[i] end
  end
  return blocks
end

local function new_ids(wanted)                    -- "" becomes the next unused number; or the refusal for one in use
  local next_id = tonumber(redis.call("HGET", POOL, "next_id"))
  local ids, numbers, here = {}, {}, {}
  for i, id in ipairs(wanted) do
    numbers[i] = -1
    if id == "" then
      while here["i" .. whole(next_id)] or redis.call("HEXISTS", SEQS, "i" .. whole(next_id)) == 1 do
        next_id = next_id + 1
      end
      numbers[i], id = next_id, "i" .. whole(next_id)
      next_id = next_id + 1
    elseif here[id] or redis.call("HEXISTS", SEQS, id) == 1 then
      return nil, reply("exists", tostring(i - 1))
    end
    ids[i], here[id] = id, true
  end
  return ids, nil, numbers, next_id
end

local function copies_done()                      -- the sources of this worker's copies; they are kept for it until then
  return unpacked(redis.call("HGET", COPYING, TOKEN) or "")
end

-- Every change begins with `enter` and ends with `done`. A worker numbers its changes without gaps: one that is sent
-- again gets the same reply again, and a gap means that the server has forgotten what it had acknowledged.

local function enter()                            -- a reply to send at once, or nil: go on
  local refusal = fenced()
  if refusal then return refusal end
  local request = tonumber(REQUEST)
  local space = string.find(last, " ", 1, true)
  local before = tonumber(string.sub(last, 1, space - 1))
  if before == request then return string.sub(last, space + 1) end
  if before < request - 1 then return reply("lost") end
  if before > request then return reply("overtaken") end
  if COPIED == "1" then
    local sources = copies_done()
    refusal = too_few(sources)
    if refusal then return refusal end
    release(sources)
    write_owners()
    touched = {}
    redis.call("HDEL", COPYING, TOKEN)
  end
end

local function next_version() return redis.call("HINCRBY", POOL, "changes", 1) end

local function done(version, ...)
  write_owners()
  local answer = reply("ok", pack64({version}), ...)
  last = REQUEST .. " " .. answer
  renew()
  return answer
end

-- Taking back what belongs to no lease

local function reclaim()                          -- returns the sequences and the blocks that became free
  local alive, ids, dead = {}, {}, {}
  for i, text in ipairs(redis.call("HVALS", WORKERS)) do alive[string.match(text, "^%d+")] = true end
  local seqs = redis.call("HGETALL", SEQS)
  for i = 1, #seqs, 2 do
    if not alive[string.match(seqs[i + 1], "^%d+")] then ids[#ids + 1] = seqs[i] end
  end
  table.sort(ids)
  local blocks = {}
  for _, entries in ipairs(tables_of(ids)) do extend_list(blocks, owned(entries)) end
  for _, token in ipairs(redis.call("HKEYS", COPYING)) do
    if not alive[token] then
      extend_list(blocks, unpacked(redis.call("HGET", COPYING, token)))
      dead[#dead + 1] = token
    end
  end
  local freed = release(blocks)
  write_owners()
  touched = {}
  in_parts("HDEL", SEQS, ids)
  in_parts("HDEL", TABLES, ids)
  in_parts("HDEL", PARCELS, ids)
  in_parts("HDEL", COPYING, dead)
  return ids, freed
end
