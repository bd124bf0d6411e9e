-- Remove sessions from the sorted set of sessions, except those that were added recently.
--
-- KEYS[1]     sorted set of sessions
-- ARGV[1]     minimum age of a session's entry, seconds
-- ARGV[2]...  sessions
-- Reply       1
local now = redis.call('TIME')[1]
for i = 2, #ARGV do
  local since = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if since and now - since >= tonumber(ARGV[1]) then redis.call('ZREM', KEYS[1], ARGV[i]) end
end
return 1
