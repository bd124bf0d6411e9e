-- Publish pages that were staged under temporary keys.
--
-- KEYS[1]          session index
-- KEYS[2i], [2i+1] key of page i, and key under which it is staged
-- ARGV[1]          time to live of index and pages, milliseconds
-- ARGV[2]          epoch of the writer; '' to use the epochs of the pages' sequence numbers
-- ARGV[3]...       per page: number, sequence, bytes, header
-- Reply            bytes by which the session grew; error STALE when it is fenced under a later
--                  epoch, and an error when a staged page expired
local earliest, latest = tonumber(ARGV[2]), 0
for i = 4, #ARGV, 4 do
  local epoch = math.floor(tonumber(ARGV[i]) / 4294967296)
  latest = math.max(latest, epoch)
  if ARGV[2] == '' then earliest = math.min(earliest or epoch, epoch) end
end
if earliest < fence() then
  for i = 3, #KEYS, 2 do redis.call('DEL', KEYS[i]) end
  return stale(earliest)
end
for i = 3, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i]) == 0 then return redis.error_reply('a staged page is missing; put it again') end
end
local grown = 0
for i = 1, (#KEYS - 1) / 2 do
  local page, staged = KEYS[2 * i], KEYS[2 * i + 1]
  local number, sequence, bytes, header = unpack(ARGV, 4 * i - 1, 4 * i + 2)
  local stored_sequence, stored_bytes = entry(number)
  if stored_sequence > tonumber(sequence) then
    redis.call('DEL', staged)
  else
    redis.call('HSET', KEYS[1], number, sequence .. ' ' .. bytes .. ' ' .. header)
    redis.call('RENAME', staged, page)
    redis.call('PEXPIRE', page, ARGV[1])
    grown = grown + bytes - stored_bytes
  end
end
if latest > fence() then redis.call('HSET', KEYS[1], 'epoch', latest) end
redis.call('HINCRBY', KEYS[1], 'bytes', grown)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return grown
