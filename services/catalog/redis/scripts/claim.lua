-- Claim a session, or extend the holder's claim.
--
-- KEYS[1]: the session. KEYS[2]: its claim.
-- ARGV[1]: the holder. ARGV[2]: milliseconds.
-- Reply: {'held', epoch, worker}, {'unknown'} or {'busy', other holder}.
local found = redis.call('HMGET', KEYS[1], 'epoch', 'worker')
if not found[1] then return {'unknown'} end
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return {'busy', holder} end
redis.call('DEL', KEYS[2])  -- first, as it needs no memory: a session is claimed to be deleted
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {'held', found[1], found[2]}
