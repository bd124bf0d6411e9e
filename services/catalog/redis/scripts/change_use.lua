-- Change entries of what a tenant has, with their sums, unless a sum would be over its limit.
--
-- KEYS[1]: hash of entries: a session's id for its tokens, '#' and a name for bytes. The fields ''
--   and '#' are the sums. An entry is '<number>@<time of its last change>'.
-- ARGV[1], ARGV[2]: the most tokens and bytes ('': any number).
-- ARGV[3]: seconds for which an entry that is compared must not have changed.
-- Then three words for each change: the entry; its new number, or '+' or '-' and how much is added
--   ('': it is removed); the text that it must have, else nothing of it is changed ('*': any).
-- Reply: -1, or the sum that would be over its limit and '' or '#', and nothing is changed.
local now = tonumber(redis.call('TIME')[1])
local function parse(text)
  local number, at = string.match(text or '', '^(-?%d+)@(%d+)$')
  return tonumber(number) or 0, tonumber(at) or 0
end
local changes, sums = {}, {[''] = 0, ['#'] = 0}
for index = 4, #ARGV, 3 do
  local field, new, noted = ARGV[index], ARGV[index + 1], ARGV[index + 2]
  local old = redis.call('HGET', KEYS[1], field)
  local number, at = parse(old)
  if noted == '*' or (old == noted and now - at >= tonumber(ARGV[3])) then
    local value = tonumber(new)
    if string.match(new, '^[+-]') then value = math.max(0, number + value) end
    local sum = string.sub(field, 1, 1) == '#' and '#' or ''
    sums[sum] = sums[sum] + (value or 0) - number
    changes[#changes + 1] = {field, value}
  end
end
for index, sum in ipairs({'', '#'}) do
  local held = tonumber(redis.call('HGET', KEYS[1], sum) or 0) + sums[sum]
  if ARGV[index] ~= '' and sums[sum] > 0 and held > tonumber(ARGV[index]) then
    return {held, sum}
  end
end
-- First what needs no memory: a full Redis is emptied by deletions.
for _, change in ipairs(changes) do
  redis.call('HDEL', KEYS[1], change[1])
end
for _, change in ipairs(changes) do
  if change[2] then redis.call('HSET', KEYS[1], change[1], string.format('%d@%d', change[2], now)) end
end
for sum, added in pairs(sums) do
  if added ~= 0 then redis.call('HINCRBY', KEYS[1], sum, string.format('%d', added)) end
end
if redis.call('HLEN', KEYS[1]) <= 2 then
  local held = redis.call('HMGET', KEYS[1], '', '#')
  if redis.call('HLEN', KEYS[1]) == (held[1] and 1 or 0) + (held[2] and 1 or 0) then
    redis.call('DEL', KEYS[1])
  end
end
return {-1, ''}
