-- Give a session that was never committed the tombstone (KEYS[14]) of a deleted one.
--
-- KEYS: the session's keys.
-- ARGV: none.
-- Reply: 1 if it was given one; 0 if the session exists.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[14], 'tenant', '')
return 1
