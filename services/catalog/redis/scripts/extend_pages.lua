-- Let a session have exactly these pages in its tenant's tree. Needs page_runs.lua.
--
-- KEYS: the tree. KEYS[4]: hash of its sessions: '<run that a session ends with> <pages>'.
-- ARGV[1]: the session. ARGV[2]: the ids of its pages, joined.
-- A session's pages only become more: a call that has fewer than are known came late, and changes nothing.
-- Reply: 1 if the tree was changed, else 0.
local leaf, held = string.match(redis.call('HGET', KEYS[4], ARGV[1]) or ' 0', '^(%d*) (%d+)$')
local ids, known, last = ARGV[2], 0, ''
if #ids <= tonumber(held) * id_bytes then return 0 end
while known < #ids do
  local run = redis.call('HGET', KEYS[3], string.sub(ids, known + 1, known + id_bytes))
  if not run then break end
  local pages = redis.call('HGET', KEYS[2], run)
  local common = count_common(pages, string.sub(ids, known + 1))
  known = known + common
  last = run
  if common < #pages then
    -- The rest keeps its id: sessions that end with it need no change.
    local parent, refs = read_run(run)
    last = add_run(parent, 1, string.sub(pages, 1, common))
    put_pages(run, string.sub(pages, common + 1))
    write_run(run, last, refs)
    unlink_run(parent, run)
    link_run(last, run)
    break
  end
end
local rest = string.sub(ids, known + 1)
if rest ~= '' then
  local parent, refs = '', 0
  if last ~= '' then parent, refs = read_run(last) end
  if last ~= '' and last == leaf and refs == 1 then  -- the session's own end, with nothing behind it
    put_pages(last, redis.call('HGET', KEYS[2], last) .. rest)
  else
    if last ~= '' then write_run(last, parent, refs + 1) end
    last = add_run(last, 0, rest)
  end
end
if last ~= leaf then
  count_ref(last, 1)
  redis.call('ZADD', KEYS[5], 0, 's' .. last .. ':' .. ARGV[1])
  redis.call('ZREM', KEYS[5], 's' .. leaf .. ':' .. ARGV[1])
  drop_run(leaf)
end
redis.call('HSET', KEYS[4], ARGV[1], string.format('%s %d', last, #ids / id_bytes))
return 1
