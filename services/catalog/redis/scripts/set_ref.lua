-- Change the number of an owner's pages that a session references, which is known to exist, or to be
-- deleted.
--
-- KEYS: the owner's keys.
-- ARGV[1]: the referencing session. ARGV[2]: number of pages (0: remove the reference).
-- Reply: an integer without meaning.
if not redis.call('ZSCORE', KEYS[13], ARGV[1]) then return 0 end
redis.call('ZREM', KEYS[15], ARGV[1])
if ARGV[2] == '0' then return redis.call('ZREM', KEYS[13], ARGV[1]) end
return redis.call('ZADD', KEYS[13], ARGV[2], ARGV[1])
