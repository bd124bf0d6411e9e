-- Replace a string if it still has the value that was read; its time to live stays.
--
-- KEYS[1]: the key. ARGV[1]: the value read. ARGV[2]: the new value.
-- Reply: 0 if it was replaced, 1 if it had changed since and was left alone.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 1 end
redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL')
return 0
