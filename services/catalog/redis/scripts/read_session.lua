-- Read a session with its open calls and its repairs since the last turn.
--
-- KEYS: the session's keys.
-- ARGV: names of fields of KEYS[1].
-- Reply: nil if there is no session, else {the fields' values; of each open call the value, the
--   fields signal, delta and batch's repaired flag; the repairs}.
local values = redis.call('HMGET', KEYS[1], unpack(ARGV))
local found = redis.call('HMGET', KEYS[1], 'turns', 'calls', 'recent')
if not found[1] then return false end
local calls, repairs = {}, {}
for position = 0, tonumber(found[2]) - 1 do
  local at = found[1] .. ':' .. position
  local parts = redis.call('HMGET', KEYS[5], at, at .. ':signal', at .. ':delta', at .. ':batch')
  parts[4] = redis.call('HGET', KEYS[5], found[1] .. ':repaired:' .. (parts[4] or ''))
  table.insert(calls, parts)
end
if tonumber(found[3]) > 0 then
  repairs = redis.call('LRANGE', KEYS[6], -tonumber(found[3]), -1)
end
return {values, calls, repairs}
