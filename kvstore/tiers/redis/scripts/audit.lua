-- Compare the index of a session with its pages.
--
-- KEYS[1]  session index
-- Reply    list of discrepancies, one string each; empty when there is none
local discrepancies, sum = {}, 0
for _, number in ipairs(numbers()) do
  local _, bytes = entry(number)
  local actual = redis.call('STRLEN', KEYS[1] .. ':' .. number)
  if actual ~= bytes then
    table.insert(discrepancies, 'page ' .. number .. ' has ' .. actual .. ' bytes, expected ' .. bytes)
  end
  sum = sum + bytes
end
local accounted = tonumber(redis.call('HGET', KEYS[1], 'bytes') or 0)
if accounted ~= sum then
  table.insert(discrepancies, 'pages take ' .. sum .. ' bytes, accounted ' .. accounted)
end
return discrepancies
