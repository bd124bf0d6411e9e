-- Replace a field of a hash if it has a given value.
--
-- KEYS[1]: the hash.
-- ARGV[1]: the field. ARGV[2]: the new value. ARGV[3]: the value that it replaces.
-- Reply: 1 if it was replaced, else 0.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
