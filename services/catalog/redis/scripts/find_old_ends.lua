-- Find sessions, among some, whose pages have not changed for long. Needs page_tree.lua.
--
-- KEYS: the tree.
-- ARGV[1]: where the last look ended ('0': at the beginning). ARGV[2]: about how many sessions to look at.
-- ARGV[3]: seconds.
-- Reply: where the look ended, then of each such session its name and the number of its last proposal.
local found = redis.call('HSCAN', KEYS[3], ARGV[1], 'COUNT', ARGV[2])
local reply = {found[1]}
for at = 1, #found[2], 2 do
  local session, entry = found[2][at], found[2][at + 1]
  local changed = session ~= '' and tonumber(string.match(entry, '^%d+'))
  if changed and changed < now - ARGV[3] then
    reply[#reply + 1] = session
    reply[#reply + 1] = tonumber(string.sub(entry, -16))
  end
end
return reply
