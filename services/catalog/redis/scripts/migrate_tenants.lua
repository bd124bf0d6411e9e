-- Sort the tenants, which were a set until version 2, by the last time they created a session.
--
-- KEYS[1]: the tenants.
-- Reply: number of tenants that were moved.
if redis.call('TYPE', KEYS[1]).ok ~= 'set' then return 0 end
local tenants, now = redis.call('SMEMBERS', KEYS[1]), redis.call('TIME')[1]
redis.call('DEL', KEYS[1])
for _, tenant in ipairs(tenants) do redis.call('ZADD', KEYS[1], now, tenant) end
return #tenants
