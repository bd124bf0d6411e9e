-- Reconcile a deleted owner's tombstone with the references to its pages.
--
-- KEYS: the owner's keys.
-- ARGV: pairs of a session whose reference has ended and the entry it had.
-- Reply: {'due', pages} if the workers may hold more than the first `pages` pages, {'same', pages}
--   if they do not, {'exists'} if the owner is not deleted.
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[13], ARGV[i]) == ARGV[i + 1] then
    redis.call('HDEL', KEYS[13], ARGV[i])
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then return {'exists'} end
if redis.call('EXISTS', KEYS[14]) == 0 then return {'same', 0} end
local need = 0
for _, entry in ipairs(redis.call('HVALS', KEYS[13])) do
  need = math.max(need, tonumber(string.match(entry, '^%d+')))
end
local noted = redis.call('HMGET', KEYS[14], 'retained', 'due')
if noted[1] and tonumber(noted[1]) <= need then
  return {noted[2] and 'due' or 'same', tonumber(noted[1])}
end
redis.call('HSET', KEYS[14], 'retained', need, 'due', 1)
if need == 0 then
  redis.call('DEL', KEYS[13])
  redis.call('EXPIRE', KEYS[14], 86400)
end
return {'due', need}
