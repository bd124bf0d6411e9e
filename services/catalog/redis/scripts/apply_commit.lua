-- Apply a commit to one session, or return the result of the commit if it was applied before.
-- Needs commit_log.lua.
--
-- KEYS: the session's keys; the key of an idempotency record may follow.
-- ARGV[1]: id of the commit.
-- ARGV[2]: the epoch it is made under ('': any; 'new': the session must not exist yet).
-- ARGV[3]: '1' if it is applied even when Redis is out of memory, else ''.
-- ARGV[4]: number of conditions. Each is the reply that a reading command must have ('': nil), and
--   the command.
-- Then the commands of the commit.
-- Commands are: number of words, name, index of a key, the other words.
-- The session's field `bytes` is the size of its settings, log, states and calls.
-- Reply: {'done', '<epoch> <bytes it grew by> <tenant>'}, {'exists'}, {'unknown'}, {'stale', epoch} or
--   {'changed', name of the condition's command}.
local done = find_result(ARGV[1])
if done then return {'done', done} end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if ARGV[2] == 'new' then
  if epoch then return {'exists'} end
else
  if not epoch then return {'unknown'} end
  if ARGV[2] ~= '' and ARGV[2] ~= epoch then return {'stale', epoch} end
end
local at = 5
local lists, hashes = {[3] = true, [4] = true}, {[5] = true, [12] = true}
local fields = {state = true, page_ids = true, settings = true}
local function grows(name, index, first, last)
  local bytes = 0
  if lists[index] and name == 'RPUSH' then
    for word = first, last do bytes = bytes + #ARGV[word] end
  elseif name == 'HSET' and (hashes[index] or index == 1) then
    for word = first, last, 2 do
      if index ~= 1 or fields[ARGV[word]] then
        bytes = bytes + #ARGV[word + 1] - redis.call('HSTRLEN', KEYS[index], ARGV[word])
      end
    end
  elseif name == 'HDEL' and hashes[index] then
    for word = first, last do bytes = bytes - redis.call('HSTRLEN', KEYS[index], ARGV[word]) end
  end
  return bytes
end
local grown = 0
local function run()
  local words = tonumber(ARGV[at])
  local first, name, index = at + 3, ARGV[at + 1], tonumber(ARGV[at + 2])
  at = at + words + 1
  grown = grown + grows(name, index, first, at - 1)
  return redis.call(name, KEYS[index], unpack(ARGV, first, at - 1))
end
for _ = 1, tonumber(ARGV[4]) do
  local expected, name = ARGV[at], ARGV[at + 2]
  at = at + 1
  if tostring(run() or '') ~= expected then return {'changed', name} end
end
local held = redis.call('HGET', KEYS[1], 'bytes') or 0
grown = 0
if ARGV[3] == '1' then redis.call('LTRIM', KEYS[2], 0, 30) end  -- needs no memory
redis.call('LPUSH', KEYS[2], ARGV[1] .. ' ')
redis.call('LTRIM', KEYS[2], 0, 31)
while at <= #ARGV do run() end
redis.call('HSET', KEYS[1], 'bytes', string.format('%d', held + grown))
local now = redis.call('HMGET', KEYS[1], 'epoch', 'tenant')
local result = string.format('%s %d %s', now[1], grown, now[2])
redis.call('LSET', KEYS[2], 0, ARGV[1] .. ' ' .. result)
return {'done', result}
