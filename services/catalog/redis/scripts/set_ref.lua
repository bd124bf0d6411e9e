-- Change the number of an owner's pages that a session references.
--
-- KEYS: the owner's keys.
-- ARGV[1]: the referencing session. ARGV[2]: number of pages (0: remove the reference).
-- Reply: an integer without meaning.
if redis.call('HEXISTS', KEYS[13], ARGV[1]) == 0 then return 0 end
if ARGV[2] == '0' then return redis.call('HDEL', KEYS[13], ARGV[1]) end
return redis.call('HSET', KEYS[13], ARGV[1], ARGV[2] .. ' ' .. redis.call('TIME')[1])
