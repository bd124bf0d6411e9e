-- Apply a commit to one session, or return the result of the commit if it was applied before.
-- Needs commit_log.lua.
--
-- KEYS: the session's keys; the key of an idempotency record may follow.
-- ARGV[1]: id of the commit.
-- ARGV[2]: the epoch it is made under ('': any; 'new': the session must not exist yet).
-- ARGV[3]: the last time at which it may be made, in the server's Unix seconds ('': any).
-- ARGV[4]: number of conditions. Each takes three arguments: index of a key, a field ('': the key
--   itself) and its value ('': absent).
-- Then commands: number of words, name, index of a key, the other words.
-- Reply: {'done', '<epoch> <tenant>'}, {'exists'}, {'unknown'}, {'stale', epoch}, {'late'} or
--   {'changed', field}.
local done = find_result(ARGV[1])
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
  if field ~= '' then
    found = redis.call('HGET', key, field) or ''
  elseif redis.call('EXISTS', key) == 1 then
    found = 'exists'
  end
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
