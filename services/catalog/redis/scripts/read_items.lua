-- Read some items of a conversation.
--
-- KEYS[1]: the conversation. KEYS[2]: the items' ids by position. KEYS[3]: their bodies by id.
-- ARGV[1]: the id of the item before the first ('': none). ARGV[2]: how many. ARGV[3]: '1' for the
-- newest first.
-- ARGV[4]: the most items it may have, ARGV[5]: the most bytes of their bodies ('': unlimited), without ARGV[6] of
-- each that its encryption takes.
-- Reply: {'done', id, body, ...}, {'unknown'}, {'item'} if the item before the first is unknown, or
--   {'full', items, bytes}.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'unknown'} end
if ARGV[4] ~= '' then
  local items, bytes = measure_items(KEYS[2], KEYS[3], tonumber(ARGV[6]))
  if items > tonumber(ARGV[4]) or bytes > tonumber(ARGV[5]) then return {'full', items, bytes} end
end
local range, rank = 'ZRANGE', 'ZRANK'
if ARGV[3] == '1' then range, rank = 'ZREVRANGE', 'ZREVRANK' end
local first = 0
if ARGV[1] ~= '' then
  local before = redis.call(rank, KEYS[2], ARGV[1])
  if not before then return {'item'} end
  first = before + 1
end
local reply = {'done'}
for _, id in ipairs(redis.call(range, KEYS[2], first, first + tonumber(ARGV[2]) - 1)) do
  reply[#reply + 1] = id
  reply[#reply + 1] = redis.call('HGET', KEYS[3], id)
end
return reply
