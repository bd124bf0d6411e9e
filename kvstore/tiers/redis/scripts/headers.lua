-- List the pages of a session.
--
-- KEYS[1]  session index
-- Reply    two lists: headers of the pages that exist, numbers of the pages that Redis has lost
local headers, lost = {}, {}
for _, number in ipairs(numbers()) do
  local _, _, header = entry(number)
  if redis.call('EXISTS', KEYS[1] .. ':' .. number) == 1 then table.insert(headers, header)
  else table.insert(lost, number) end
end
return {headers, lost}
