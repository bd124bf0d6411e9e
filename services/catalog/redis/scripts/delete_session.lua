-- Delete a session. What is left to do in other slots is noted before.
-- Needs commit_log.lua.
--
-- KEYS: the session's keys, its claim, then the key of an idempotency record if there is one.
-- ARGV[1]: id of the commit.
-- ARGV[2]: milliseconds for which the commit and the record are retained.
-- ARGV[3]: the idempotency record ('': none).
-- Reply: 'done', 'unknown', or 'changed' if there is a record under that key already.
if find_result(ARGV[1]) then return 'done' end
if redis.call('EXISTS', KEYS[1]) == 0 then return 'unknown' end
if ARGV[3] ~= '' and redis.call('EXISTS', KEYS[14]) == 1 then return 'changed' end
-- First what needs no memory: a full Redis is emptied by deletions.
redis.call('DEL', KEYS[1], unpack(KEYS, 3, 13))
redis.call('LPUSH', KEYS[2], ARGV[1] .. ' deleted')
redis.call('PEXPIRE', KEYS[2], ARGV[2])
if ARGV[3] ~= '' then redis.call('SET', KEYS[14], ARGV[3], 'PX', ARGV[2]) end
return 'done'
