-- Delete a string if it has a given value.
--
-- KEYS[1]: the key. ARGV[1]: the value.
-- Reply: 1 if it was deleted, else 0.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
