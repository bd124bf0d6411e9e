-- Append items to a conversation, and create it if its fields are given.
--
-- KEYS[1]: the conversation. KEYS[2]: the items' ids by position. KEYS[3]: their bodies by id.
-- KEYS[4]: the request's idempotency record, if it has one.
-- ARGV[1]: the fields of a new conversation ('': it exists). ARGV[2]: its tenant.
-- ARGV[3]: the most items it may have, ARGV[4]: the most bytes of their bodies ('': unlimited), without
-- ARGV[5] of each that its encryption takes.
-- ARGV[6]: the text of the record, ARGV[7]: its lifetime in milliseconds.
-- ARGV[8..]: id and body of each item. One whose id is there already is left out.
-- What fields and bodies take is kept in the conversation's field `bytes`.
-- Reply: {'done', bytes it grew by}, {'unknown'}, {'exists'} where a new one is there already, {'answered'} where the
--   record is, or {'full', items, bytes} as it would be.
local creates = ARGV[1] ~= ''
local exists = redis.call('EXISTS', KEYS[1]) == 1
if creates and exists then return {'exists'} end
if not creates and not exists then return {'unknown'} end
if not creates and KEYS[4] and redis.call('EXISTS', KEYS[4]) == 1 then return {'answered'} end
if ARGV[3] ~= '' then
  local overhead = tonumber(ARGV[5])
  local items, bytes = measure_items(KEYS[2], KEYS[3], overhead)
  for index = 8, #ARGV, 2 do
    if redis.call('HEXISTS', KEYS[3], ARGV[index]) == 0 then
      items = items + 1
      bytes = bytes + #ARGV[index + 1] - overhead
    end
  end
  if items > tonumber(ARGV[3]) or bytes > tonumber(ARGV[4]) then return {'full', items, bytes} end
end
local held = redis.call('HGET', KEYS[1], 'bytes')
if not held then held = select(2, measure_items(KEYS[2], KEYS[3], 0)) end
local grown = creates and #ARGV[1] or 0
if creates then redis.call('HSET', KEYS[1], 'fields', ARGV[1], 'tenant', ARGV[2]) end
if KEYS[4] then redis.call('SET', KEYS[4], ARGV[6], 'PX', ARGV[7]) end
for index = 8, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[3], ARGV[index], ARGV[index + 1]) == 1 then
    redis.call('ZADD', KEYS[2], redis.call('HINCRBY', KEYS[1], 'next', 1), ARGV[index])
    grown = grown + #ARGV[index + 1]
  end
end
redis.call('HSET', KEYS[1], 'bytes', string.format('%d', held + grown))
return {'done', grown}
