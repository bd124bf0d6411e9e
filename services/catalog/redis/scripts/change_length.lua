-- Change the length of one of a tenant's sessions, and the sum of all in the same step.
--
-- KEYS[1]: hash of lengths by session; the field '' is their sum.
-- ARGV[1]: the session. ARGV[2]: its new length ('': none, it is deleted). ARGV[3]: the length that
--   it must have had ('*': any).
-- Reply: an integer without meaning.
local old = redis.call('HGET', KEYS[1], ARGV[1])
if ARGV[3] ~= '*' and old ~= ARGV[3] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])  -- first, as it needs no memory
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('HINCRBY', KEYS[1], '', (tonumber(ARGV[2]) or 0) - (tonumber(old) or 0))
if redis.call('HLEN', KEYS[1]) == 1 then redis.call('DEL', KEYS[1]) end
return 0
