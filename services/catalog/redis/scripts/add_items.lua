-- Append items to a conversation, and create it if its fields are given.
--
-- KEYS[1]: the conversation. KEYS[2]: the items' ids by position. KEYS[3]: their bodies by id.
-- ARGV[1]: the fields of a new conversation ('': it exists). ARGV[2]: its tenant.
-- ARGV[3]: the most items it may have, ARGV[4]: the most bytes of their bodies ('': unlimited).
-- ARGV[5..]: id and body of each item. One whose id is there already is left out.
-- Reply: {'done'}, {'unknown'}, or {'full', items, bytes} as it would be.
if ARGV[1] == '' and redis.call('EXISTS', KEYS[1]) == 0 then return {'unknown'} end
if ARGV[3] ~= '' then
  local items, bytes = measure_items(KEYS[2], KEYS[3])
  for index = 5, #ARGV, 2 do
    if redis.call('HEXISTS', KEYS[3], ARGV[index]) == 0 then
      items = items + 1
      bytes = bytes + #ARGV[index + 1]
    end
  end
  if items > tonumber(ARGV[3]) or bytes > tonumber(ARGV[4]) then return {'full', items, bytes} end
end
if ARGV[1] ~= '' then redis.call('HSET', KEYS[1], 'fields', ARGV[1], 'tenant', ARGV[2]) end
for index = 5, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[3], ARGV[index], ARGV[index + 1]) == 1 then
    redis.call('ZADD', KEYS[2], redis.call('HINCRBY', KEYS[1], 'next', 1), ARGV[index])
  end
end
return {'done'}
