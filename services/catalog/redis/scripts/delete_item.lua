-- Delete an item of a conversation. Needs measure_items.lua.
--
-- KEYS[1]: the conversation. KEYS[2]: the items' ids by position. KEYS[3]: their bodies by id.
-- ARGV[1]: the item.
-- Reply: the bytes of its body, or -1 if there is none.
local size = redis.call('HSTRLEN', KEYS[3], ARGV[1])
local held = redis.call('HGET', KEYS[1], 'bytes') or select(2, measure_items(KEYS[2], KEYS[3], 0))
redis.call('ZREM', KEYS[2], ARGV[1])  -- first, as it needs no memory
if redis.call('HDEL', KEYS[3], ARGV[1]) == 0 then return -1 end
redis.call('HSET', KEYS[1], 'bytes', string.format('%d', held - size))
return size
