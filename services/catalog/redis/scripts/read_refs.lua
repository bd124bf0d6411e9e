-- Read what the references to an owner's pages amount to. The cost does not depend on their number.
--
-- KEYS: the owner's keys.
-- ARGV[1]: seconds after which an unverified reference is old. ARGV[2]: how many of them to return.
-- Reply: {1 if the owner exists; 1 if it has a tombstone; how many pages were retained at the last
--   reconciliation (nil: none took place); 1 if a deletion of pages is due (nil: not); how many
--   pages are referenced; old unverified references: sessions and times in turn}.
local top = redis.call('ZREVRANGE', KEYS[13], 0, 0, 'WITHSCORES')
local noted = redis.call('HMGET', KEYS[14], 'retained', 'due')
local last = redis.call('TIME')[1] - ARGV[1]
return {
  redis.call('EXISTS', KEYS[1]),
  redis.call('EXISTS', KEYS[14]),
  noted[1],
  noted[2],
  tonumber(top[2] or 0),
  redis.call('ZRANGEBYSCORE', KEYS[15], '-inf', last, 'WITHSCORES', 'LIMIT', 0, ARGV[2]),
}
