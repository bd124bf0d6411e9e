-- Delete pages of a session.
--
-- KEYS[1]     session index
-- KEYS[i + 1] key of page i
-- ARGV[1]     'all', or 'lost' to delete only the entries of pages that Redis has lost
-- ARGV[2]     epoch of the writer; '' to skip the fence
-- ARGV[3]     time to live of the fence of a session without pages, milliseconds; it keeps late
--             writers from bringing pages back
-- ARGV[i + 3] number of page i
-- Reply       bytes freed; error STALE when the session is fenced under a later epoch
local epoch, freed = tonumber(ARGV[2]), 0
if epoch and epoch < fence() then return stale(epoch) end
for i = 2, #KEYS do
  if ARGV[1] == 'all' or redis.call('EXISTS', KEYS[i]) == 0 then
    local _, bytes = entry(ARGV[i + 2])
    freed = freed + bytes
    redis.call('DEL', KEYS[i])
    redis.call('HDEL', KEYS[1], ARGV[i + 2])
  end
end
local current = fence()
if epoch and epoch > current then
  redis.call('HDEL', KEYS[1], 'epoch')
  redis.call('HSET', KEYS[1], 'epoch', epoch)
  current = epoch
end
if #numbers() > 0 then
  if freed > 0 then redis.call('HINCRBY', KEYS[1], 'bytes', -freed) end
else
  redis.call('HDEL', KEYS[1], 'bytes')
  if current == 0 then redis.call('DEL', KEYS[1])
  elseif ARGV[1] == 'all' then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
end
return freed
