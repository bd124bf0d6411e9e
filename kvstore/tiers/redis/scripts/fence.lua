-- Fence a session: refuse writers of earlier epochs from now on.
--
-- KEYS[1]  session index
-- ARGV[1]  epoch under which the session is written from now on
-- ARGV[2]  time to live of the index, milliseconds
-- Reply    1; error STALE when the session is fenced under a later epoch
local epoch = tonumber(ARGV[1])
if epoch < fence() then return stale(epoch) end
redis.call('HDEL', KEYS[1], 'epoch')
redis.call('HSET', KEYS[1], 'epoch', epoch)
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
