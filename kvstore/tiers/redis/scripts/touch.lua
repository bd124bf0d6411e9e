-- Restart the time to live of a session's index and of all its pages.
--
-- KEYS[1]  session index
-- ARGV[1]  time to live, milliseconds
-- Reply    1; 0 when the session has no pages, and nothing was changed
local pages = numbers()
if #pages == 0 then return 0 end
for _, number in ipairs(pages) do redis.call('PEXPIRE', KEYS[1] .. ':' .. number, ARGV[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
