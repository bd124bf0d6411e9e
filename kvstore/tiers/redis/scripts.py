"""What Redis does in one step for the Redis tier, in Lua.

KEYS[1] is a session's index, but for the last two scripts: a hash from a page's number to
"<sequence> <bytes> <header>", with the sum of the bytes under "bytes" and the latest epoch that a writer had under
"epoch": the fence, which earlier ones do not pass. A page lies under "<index key>:<number>", in the same slot.

Lua's numbers are doubles. A sequence number is an epoch shifted by 32 bits and a count, so it is exact as long as
epochs stay below 2 ** 21.

A script that has begun to write may go on when Redis has no memory left, but its first write must be one
that never needs any.
"""

_ENTRIES = """
local function entry(number)
  local sequence, bytes, header = string.match(redis.call('HGET', KEYS[1], number) or '', '^(%d+) (%d+) (.*)$')
  return tonumber(sequence or -1), tonumber(bytes or 0), header
end
local function numbers()
  local found = redis.call('HKEYS', KEYS[1])
  for i = #found, 1, -1 do
    if found[i] == 'bytes' or found[i] == 'epoch' then table.remove(found, i) end
  end
  return found
end
local function fence()
  return tonumber(redis.call('HGET', KEYS[1], 'epoch') or 0)
end
local function stale(epoch)
  return redis.error_reply('STALE epoch ' .. epoch .. ', but a writer took over under epoch ' .. fence())
end
"""

COMMIT = (
    _ENTRIES
    + """
-- ARGV: milliseconds to live; the writer's epoch, '' for the pages' own; per page its number, sequence, bytes, header.
-- KEYS: per page where it shall be and where it is now. Returns by how many bytes the session grew.
local earliest, latest = tonumber(ARGV[2]), 0
for i = 4, #ARGV, 4 do
  local epoch = math.floor(tonumber(ARGV[i]) / 4294967296)
  latest = math.max(latest, epoch)
  if ARGV[2] == '' then earliest = math.min(earliest or epoch, epoch) end
end
if earliest < fence() then
  for i = 3, #KEYS, 2 do redis.call('DEL', KEYS[i]) end
  return stale(earliest)
end
for i = 3, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i]) == 0 then return redis.error_reply('a page was lost on its way; put it again') end
end
local grown = 0
for i = 1, (#KEYS - 1) / 2 do
  local page, staged = KEYS[2 * i], KEYS[2 * i + 1]
  local number, sequence, bytes, header = unpack(ARGV, 4 * i - 1, 4 * i + 2)
  local held_sequence, held_bytes = entry(number)
  if held_sequence > tonumber(sequence) then
    redis.call('DEL', staged)
  else
    redis.call('HSET', KEYS[1], number, sequence .. ' ' .. bytes .. ' ' .. header)
    redis.call('RENAME', staged, page)
    redis.call('PEXPIRE', page, ARGV[1])
    grown = grown + bytes - held_bytes
  end
end
if latest > fence() then redis.call('HSET', KEYS[1], 'epoch', latest) end
redis.call('HINCRBY', KEYS[1], 'bytes', grown)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return grown
"""
)

DELETE = (
    _ENTRIES
    + """
-- ARGV: 'all', or 'lost' for only those that Redis has lost; the writer's epoch, '' for whoever it is; milliseconds
-- that the fence of a session without pages lives, so that nobody who is late brings pages back; the pages' numbers.
-- KEYS: the pages. Returns bytes freed.
local epoch, freed = tonumber(ARGV[2]), 0
if epoch and epoch < fence() then return stale(epoch) end
for i = 2, #KEYS do
  if ARGV[1] == 'all' or redis.call('EXISTS', KEYS[i]) == 0 then
    local _, bytes = entry(ARGV[i + 2])
    freed = freed + bytes
    redis.call('DEL', KEYS[i])
    redis.call('HDEL', KEYS[1], ARGV[i + 2])
  end
end
local held = fence()
if epoch and epoch > held then
  redis.call('HDEL', KEYS[1], 'epoch')
  redis.call('HSET', KEYS[1], 'epoch', epoch)
  held = epoch
end
if #numbers() > 0 then
  if freed > 0 then redis.call('HINCRBY', KEYS[1], 'bytes', -freed) end
else
  redis.call('HDEL', KEYS[1], 'bytes')
  if held == 0 then redis.call('DEL', KEYS[1])
  elseif ARGV[1] == 'all' then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
end
return freed
"""
)

FENCE = (
    _ENTRIES
    + """
-- ARGV: the epoch under which the session is written from now on, milliseconds to live.
local epoch = tonumber(ARGV[1])
if epoch < fence() then return stale(epoch) end
redis.call('HDEL', KEYS[1], 'epoch')
redis.call('HSET', KEYS[1], 'epoch', epoch)
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
)

TOUCH = (
    _ENTRIES
    + """
-- ARGV: milliseconds to live, from now on for everything of the session, if it has pages.
local held = numbers()
if #held == 0 then return 0 end
for _, number in ipairs(held) do redis.call('PEXPIRE', KEYS[1] .. ':' .. number, ARGV[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""
)

HEADERS = (
    _ENTRIES
    + """
-- Returns the headers of the pages that are there, and the numbers of those that Redis has lost.
local headers, lost = {}, {}
for _, number in ipairs(numbers()) do
  local _, _, header = entry(number)
  if redis.call('EXISTS', KEYS[1] .. ':' .. number) == 1 then table.insert(headers, header)
  else table.insert(lost, number) end
end
return {headers, lost}
"""
)

AUDIT = (
    _ENTRIES
    + """
-- Returns what is wrong with the session's books, one string each.
local wrong, sum = {}, 0
for _, number in ipairs(numbers()) do
  local _, bytes = entry(number)
  local found = redis.call('STRLEN', KEYS[1] .. ':' .. number)
  if found ~= bytes then table.insert(wrong, 'page ' .. number .. ' has ' .. found .. ' bytes, not ' .. bytes) end
  sum = sum + bytes
end
local known = tonumber(redis.call('HGET', KEYS[1], 'bytes') or 0)
if known ~= sum then table.insert(wrong, 'pages take ' .. sum .. ' bytes, the books say ' .. known) end
return wrong
"""
)

LIST = """
-- KEYS: the sorted set of sessions. ARGV: a session, milliseconds to live. Puts it in with the server's time.
redis.call('ZADD', KEYS[1], redis.call('TIME')[1], ARGV[1])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

UNLIST = """
-- KEYS: the sorted set of sessions. ARGV: seconds, sessions. Takes out those that were not put in less long ago.
local now = redis.call('TIME')[1]
for i = 2, #ARGV do
  local since = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if since and now - since >= tonumber(ARGV[1]) then redis.call('ZREM', KEYS[1], ARGV[i]) end
end
return 1
"""
