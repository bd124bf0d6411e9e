-- Functions on a session's index, KEYS[1] of every script that uses them.
--
-- The index is a hash:
--   <page number> -> "<sequence> <bytes> <header>" of the page stored under KEYS[1]:<page number>
--   "bytes"       -> sum of the bytes of all pages
--   "epoch"       -> latest epoch that a writer had: the fence, which earlier epochs do not pass
-- Index and pages have one hash tag, so they are in one slot.
--
-- Lua numbers are doubles. A sequence number is an epoch shifted left by 32 bits plus a count, so it
-- is exact while epochs are below 2 ** 21.

-- Sequence number, bytes and header of a page; -1, 0 and nil when the index does not have it.
local function entry(number)
  local sequence, bytes, header = string.match(redis.call('HGET', KEYS[1], number) or '', '^(%d+) (%d+) (.*)$')
  return tonumber(sequence or -1), tonumber(bytes or 0), header
end

-- Numbers of the session's pages.
local function numbers()
  local found = redis.call('HKEYS', KEYS[1])
  for i = #found, 1, -1 do
    if found[i] == 'bytes' or found[i] == 'epoch' then table.remove(found, i) end
  end
  return found
end

-- Epoch that fences the session; 0 when none does.
local function fence()
  return tonumber(redis.call('HGET', KEYS[1], 'epoch') or 0)
end

-- Error reply for a writer whose epoch does not pass the fence. The client matches "STALE".
local function stale(epoch)
  return redis.error_reply('STALE epoch ' .. epoch .. ', but a writer took over under epoch ' .. fence())
end
