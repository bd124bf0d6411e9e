"""What Redis does in one step for the catalog, in Lua.

Where nothing else is said, KEYS are a session's keys in the order of `redis_keys`. A script that has begun to write may
go on when Redis has no memory left; its first write then fails, and nothing was changed.
"""

_REMEMBERED = """
-- The result of a commit that was made already: its reply was lost.
local function remembered(id)
  for _, entry in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
    local known, result = string.match(entry, '^(%S+) (.*)$')
    if known == id then return result end
  end
end
"""

APPLY = (
    _REMEMBERED
    + """
-- ARGV: an id of the commit; the epoch it is made under ('': any, 'new': the session must not exist yet); the last time
-- at which it may be made ('': any), in the server's seconds; how many conditions there are, each a key's place, a
-- field ('': the key itself) and its value ('': none); then commands, each the number of its words, its name, its key's
-- place and the other words. Returns {'done', '<epoch> <tenant>'} or why not.
local done = remembered(ARGV[1])
if done then return {'done', done} end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if ARGV[2] == 'new' then
  if epoch then return {'exists'} end
else
  if not epoch then return {'unknown'} end
  if ARGV[2] ~= '' and ARGV[2] ~= epoch then return {'stale', epoch} end
end
if ARGV[3] ~= '' and tonumber(redis.call('TIME')[1]) > tonumber(ARGV[3]) then return {'late'} end
local at = 5
for _ = 1, tonumber(ARGV[4]) do
  local key, field, found = KEYS[tonumber(ARGV[at])], ARGV[at + 1], ''
  if field ~= '' then found = redis.call('HGET', key, field) or ''
  elseif redis.call('EXISTS', key) == 1 then found = 'there' end
  if found ~= ARGV[at + 2] then return {'changed', field} end
  at = at + 3
end
redis.call('LPUSH', KEYS[2], ARGV[1] .. ' ')
redis.call('LTRIM', KEYS[2], 0, 31)
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  redis.call(ARGV[at + 1], KEYS[tonumber(ARGV[at + 2])], unpack(ARGV, at + 3, at + words))
  at = at + words + 1
end
local now = redis.call('HMGET', KEYS[1], 'epoch', 'tenant')
local result = now[1] .. ' ' .. now[2]
redis.call('LSET', KEYS[2], 0, ARGV[1] .. ' ' .. result)
return {'done', result}
"""
)

DELETE = (
    _REMEMBERED
    + """
-- ARGV: an id of the commit, milliseconds for which it and the answer are remembered, an answer ('': none). KEYS end
-- with the claim and, if there is one, the answer. What is to be done elsewhere stays under GONE. Returns 'done',
-- 'unknown' or 'changed'.
if remembered(ARGV[1]) then return 'done' end
local found = redis.call('HMGET', KEYS[1], 'epoch', 'tenant', 'digest')
if not found[1] then return 'unknown' end
if ARGV[3] ~= '' and redis.call('EXISTS', KEYS[16]) == 1 then return 'changed' end
redis.call('LPUSH', KEYS[2], ARGV[1] .. ' deleted')
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('DEL', KEYS[14])  -- of an earlier session of that id
redis.call('HSET', KEYS[14], 'tenant', found[2], 'digest', found[3] or '')
redis.call('DEL', KEYS[1], unpack(KEYS, 3, 11))
redis.call('DEL', KEYS[15])
if ARGV[3] ~= '' then redis.call('SET', KEYS[16], ARGV[3], 'PX', ARGV[2]) end
return 'done'
"""
)

READ = """
-- ARGV: commands as in APPLY. Returns whether there is a session, and the replies.
local at, replies = 1, {redis.call('EXISTS', KEYS[1])}
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  local reply = redis.call(ARGV[at + 1], KEYS[tonumber(ARGV[at + 2])], unpack(ARGV, at + 3, at + words))
  table.insert(replies, reply)
  at = at + words + 1
end
return replies
"""

SESSION = """
-- ARGV: fields of the session. Returns their values, the parts of its open calls, its repairs since the last turn; or
-- nothing when there is no session.
local values = redis.call('HMGET', KEYS[1], unpack(ARGV))
local found = redis.call('HMGET', KEYS[1], 'turns', 'calls', 'recent')
if not found[1] then return false end
local calls, repairs = {}, {}
for position = 0, tonumber(found[2]) - 1 do
  local at = found[1] .. ':' .. position
  local parts = redis.call('HMGET', KEYS[5], at, at .. ':signal', at .. ':delta', at .. ':batch')
  parts[4] = redis.call('HGET', KEYS[5], found[1] .. ':repaired:' .. (parts[4] or ''))
  table.insert(calls, parts)
end
if tonumber(found[3]) > 0 then repairs = redis.call('LRANGE', KEYS[6], -tonumber(found[3]), -1) end
return {values, calls, repairs}
"""

CALL = """
-- ARGV: the id of a call. Returns the parts of the newest one, the result that a turn said for it, the session's turns.
local at = redis.call('HGET', KEYS[5], '@' .. ARGV[1])
if not at then return false end
local parts = redis.call('HMGET', KEYS[5], at, at .. ':signal', at .. ':delta', at .. ':batch')
local turn = string.match(at, '^%d+')
parts[4] = redis.call('HGET', KEYS[5], turn .. ':repaired:' .. (parts[4] or ''))
return {parts, redis.call('HGET', KEYS[5], turn .. ':said:' .. ARGV[1]), redis.call('HGET', KEYS[1], 'turns')}
"""

SNAPSHOT = """
-- ARGV: a number of turns. Returns what a fork there begins with, or 'unknown', or 'turn' when there are not so many.
local found = redis.call('HMGET', KEYS[1], 'turns', 'calls', 'recent', 'repairs')
if not found[1] then return 'unknown' end
local turns, last = tonumber(ARGV[1]), tonumber(found[1])
if turns < 0 or turns > last then return 'turn' end
local log, tokens, rest = {}, {}, {}
if turns > 0 then
  log, tokens = redis.call('LRANGE', KEYS[3], 0, turns - 1), redis.call('LRANGE', KEYS[4], 0, turns - 1)
end
if turns == last then
  rest = {redis.call('LRANGE', KEYS[6], 0, -1)}
  for place = 7, 11 do table.insert(rest, redis.call('HGETALL', KEYS[place])) end
end
return {found, log, tokens, redis.call('HGETALL', KEYS[5]), rest}
"""

CLAIM = """
-- KEYS: the session, its claim. ARGV: a holder, milliseconds. Returns {'held', epoch, worker}, or why not.
local found = redis.call('HMGET', KEYS[1], 'epoch', 'worker')
if not found[1] then return {'unknown'} end
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return {'busy', holder} end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {'held', found[1], found[2]}
"""

DROP_IF = """
-- KEYS: one key. ARGV: the value it must have to be deleted.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

REPLACE_IF = """
-- KEYS: one key. ARGV: a value, the value it may replace ('': none), milliseconds to live ('': for good).
-- Returns the value that is there now.
local found = redis.call('GET', KEYS[1])
if found and found ~= ARGV[2] then return found end
if ARGV[3] == '' then redis.call('SET', KEYS[1], ARGV[1]) else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3]) end
return ARGV[1]
"""

SHARE = """
-- KEYS: an owner's. ARGV: who shares, how many pages. Returns the server's time, or nothing when the pages are no more.
local pages, now = tonumber(ARGV[2]), redis.call('TIME')[1]
if redis.call('EXISTS', KEYS[1]) == 0 then
  if redis.call('EXISTS', KEYS[14]) == 0 or redis.call('EXISTS', KEYS[13]) == 0 or pages < 1 then return false end
  local kept = redis.call('HGET', KEYS[14], 'kept')
  if kept and pages > tonumber(kept) then return false end
end
local before = string.match(redis.call('HGET', KEYS[13], ARGV[1]) or '0', '^%d+')
redis.call('HSET', KEYS[13], ARGV[1], math.max(pages, tonumber(before)) .. ' ' .. now)
return now
"""

SET_SHARE = """
-- KEYS: an owner's. ARGV: who shares, how many pages (0: none any more).
if redis.call('HEXISTS', KEYS[13], ARGV[1]) == 0 then return 0 end
if ARGV[2] == '0' then return redis.call('HDEL', KEYS[13], ARGV[1]) end
return redis.call('HSET', KEYS[13], ARGV[1], ARGV[2] .. ' ' .. redis.call('TIME')[1])
"""

SETTLE = """
-- KEYS: a deleted owner's. ARGV: pairs of a session that does not share any more and what SHARERS
-- says of it. Returns {'due', pages} when fewer pages are needed than the workers have let go of, else
-- {'same', pages} or {'lives'}.
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[13], ARGV[i]) == ARGV[i + 1] then redis.call('HDEL', KEYS[13], ARGV[i]) end
end
if redis.call('EXISTS', KEYS[1]) == 1 then return {'lives'} end
if redis.call('EXISTS', KEYS[14]) == 0 then return {'same', 0} end
local need = 0
for _, entry in ipairs(redis.call('HVALS', KEYS[13])) do
  need = math.max(need, tonumber(string.match(entry, '^%d+')))
end
local told = redis.call('HMGET', KEYS[14], 'kept', 'due')
if told[1] and tonumber(told[1]) <= need then return {told[2] and 'due' or 'same', tonumber(told[1])} end
redis.call('HSET', KEYS[14], 'kept', need, 'due', 1)
if need == 0 then
  redis.call('DEL', KEYS[13])
  redis.call('EXPIRE', KEYS[14], 86400)
end
return {'due', need}
"""

DROPPED = """
-- KEYS: a deleted owner's. ARGV: how many pages were left when the workers let go of the others.
if redis.call('HGET', KEYS[14], 'kept') == ARGV[1] then redis.call('HDEL', KEYS[14], 'due') end
return 0
"""

SHARERS = """
-- KEYS: an owner's. Returns whether it lives, whether it is marked as deleted, how many pages were told to be kept
-- (nothing: nobody was told), the server's time, and SHARERS.
return {redis.call('EXISTS', KEYS[1]), redis.call('EXISTS', KEYS[14]), redis.call('HGET', KEYS[14], 'kept'),
        redis.call('TIME')[1], redis.call('HGETALL', KEYS[13])}
"""

CORRECT = """
-- KEYS: a hash. ARGV: a field, the value it has, the value it should have ('': none).
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] == '' then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
"""

SUM = """
-- KEYS: a hash of numbers. Returns their sum.
local sum = 0
for _, value in ipairs(redis.call('HVALS', KEYS[1])) do sum = sum + tonumber(value) end
return sum
"""
