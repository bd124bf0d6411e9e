-- Add members to a set, even if Redis is out of memory.
--
-- KEYS[1]: the set.
-- ARGV: the members.
-- Reply: 0.
redis.call('SREM', KEYS[1], unpack(ARGV))  -- first, as it needs no memory
redis.call('SADD', KEYS[1], unpack(ARGV))
return 0
