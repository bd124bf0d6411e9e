-- A function of scripts that bound a conversation's items, to be prepended to them.
--
-- KEYS[2]: the items' ids by position (`order`). KEYS[3]: their bodies by id (`bodies`). ARGV: none.
-- `overhead`: the bytes that a body takes more than it has, because it is encrypted.
-- Reply: their number, and the bytes of their bodies.
local function measure_items(order, bodies, overhead)
  local ids = redis.call('ZRANGE', order, 0, -1)
  local bytes = 0
  for _, id in ipairs(ids) do bytes = bytes + redis.call('HSTRLEN', bodies, id) - overhead end
  return #ids, bytes
end
