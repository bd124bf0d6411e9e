-- Add the sum to the lengths of a tenant's sessions, which had none until version 2.
--
-- KEYS[1]: hash of lengths by session; the field '' is their sum.
-- Reply: 1 if it was added, else 0.
if redis.call('HEXISTS', KEYS[1], '') == 1 then return 0 end
local sum = 0
for _, length in ipairs(redis.call('HVALS', KEYS[1])) do sum = sum + tonumber(length) end
return redis.call('HSET', KEYS[1], '', sum)
