-- Sum the values of a hash.
--
-- KEYS[1]: a hash of integers.
-- Reply: their sum.
local sum = 0
for _, value in ipairs(redis.call('HVALS', KEYS[1])) do sum = sum + tonumber(value) end
return sum
