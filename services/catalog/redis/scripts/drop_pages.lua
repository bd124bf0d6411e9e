-- Forget a deleted session in its tenant's tree of page ids. Needs page_runs.lua.
--
-- KEYS: the tree, and in KEYS[4] its sessions, as of extend_pages.lua.
-- ARGV[1]: the session.
-- Reply: 1 if it was there, else 0.
local found = redis.call('HGET', KEYS[4], ARGV[1])
if not found then return 0 end
redis.call('HDEL', KEYS[4], ARGV[1])  -- first, as it needs no memory: a full Redis is emptied by deletions
local leaf = string.match(found, '^(%d*) ')
redis.call('ZREM', KEYS[5], 's' .. leaf .. ':' .. ARGV[1])
drop_run(leaf)
if redis.call('HLEN', KEYS[4]) == 0 then redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[5]) end
return 1
