-- Change a field of a hash if it has a given value.
--
-- KEYS[1]: the hash.
-- ARGV[1]: the field. ARGV[2]: the value it has. ARGV[3]: the value it should have ('': none).
-- Reply: an integer without meaning.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if ARGV[3] == '' then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
