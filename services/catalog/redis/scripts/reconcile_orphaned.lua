-- Reconcile a deleted owner's tombstone with the references to its pages.
--
-- KEYS: the owner's keys.
-- ARGV: triples of a session whose reference was unverified, the time it had, and 1 if the session
--   exists, else 0: the reference has ended.
-- Reply: {'due', pages} if the workers may hold more than the first `pages` pages, {'same', pages}
--   if they do not, {'exists'} if the owner is not deleted.
for i = 1, #ARGV, 3 do
  if redis.call('ZSCORE', KEYS[15], ARGV[i]) == ARGV[i + 1] then
    redis.call('ZREM', KEYS[15], ARGV[i])
    if ARGV[i + 2] == '0' then redis.call('ZREM', KEYS[13], ARGV[i]) end
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then return {'exists'} end
if redis.call('EXISTS', KEYS[14]) == 0 then return {'same', 0} end
local top = redis.call('ZREVRANGE', KEYS[13], 0, 0, 'WITHSCORES')
local need = tonumber(top[2] or 0)
local noted = redis.call('HMGET', KEYS[14], 'retained', 'due')
if noted[1] and tonumber(noted[1]) <= need then
  return {noted[2] and 'due' or 'same', tonumber(noted[1])}
end
redis.call('HDEL', KEYS[14], 'due')  -- first, as it needs no memory
redis.call('HSET', KEYS[14], 'retained', need, 'due', 1)
if need == 0 then
  redis.call('DEL', KEYS[13], KEYS[15])
  redis.call('EXPIRE', KEYS[14], 86400)
end
return {'due', need}
