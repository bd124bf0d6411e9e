-- Read the newest tool call of an id.
--
-- KEYS: the session's keys.
-- ARGV[1]: id of the call.
-- Reply: nil if there is none, else {the call's name and value, the fields signal, delta and batch's
--   repaired flag; the result that a turn brought inline, if any; the number of turns}.
local at = redis.call('HGET', KEYS[5], '@' .. ARGV[1])
if not at then return false end
local parts = redis.call('HMGET', KEYS[5], at, at .. ':signal', at .. ':delta', at .. ':batch')
local turn = string.match(at, '^%d+')
parts[4] = redis.call('HGET', KEYS[5], turn .. ':repaired:' .. (parts[4] or ''))
local inline = redis.call('HGET', KEYS[5], turn .. ':inline:' .. ARGV[1])
table.insert(parts, 1, at)
return {parts, inline, redis.call('HGET', KEYS[1], 'turns')}
