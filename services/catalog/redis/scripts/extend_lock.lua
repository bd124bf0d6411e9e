-- Take a lock, or extend it for its holder.
--
-- KEYS[1]: the lock. ARGV[1]: the holder. ARGV[2]: milliseconds.
-- Reply: 1 if the holder has the lock now, else 0.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
