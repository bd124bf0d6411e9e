-- Shared by the scripts that change a tenant's tree of page ids (services/catalog/page_tree.py says what
-- it is). KEYS[1]: hash of runs: id -> '<id of the run before it, or nothing> <references>'; the field
-- 'last' has the last id. KEYS[2]: hash of their pages: id -> page ids. KEYS[3]: hash: first page -> id.
-- KEYS[5]: sorted set of what is behind each run: 'r<id>:<id of a run>' and 's<id>:<session>', all of score 0.
local id_bytes = 16

local function link_run(parent, id)
  if parent ~= '' then redis.call('ZADD', KEYS[5], 0, 'r' .. parent .. ':' .. id) end
end

local function unlink_run(parent, id)
  if parent ~= '' then redis.call('ZREM', KEYS[5], 'r' .. parent .. ':' .. id) end
end

local function read_run(id)
  local parent, refs = string.match(redis.call('HGET', KEYS[1], id), '^(%d*) (%d+)$')
  return parent, tonumber(refs)
end

local function write_run(id, parent, refs)
  redis.call('HSET', KEYS[1], id, string.format('%s %d', parent, refs))
end

local function count_ref(id, change)
  local parent, refs = read_run(id)
  write_run(id, parent, refs + change)
  return refs + change, parent
end

local function put_pages(id, pages)
  redis.call('HSET', KEYS[2], id, pages)
  redis.call('HSET', KEYS[3], string.sub(pages, 1, id_bytes), id)
end

local function add_run(parent, refs, pages)
  local id = string.format('%d', redis.call('HINCRBY', KEYS[1], 'last', 1))
  write_run(id, parent, refs)
  link_run(parent, id)
  put_pages(id, pages)
  return id
end

-- Bytes of the pages that two lists begin with.
local function count_common(one, other)
  if string.sub(other, 1, #one) == one then return #one end
  local bytes = 0
  while bytes < #one and bytes < #other
    and string.sub(one, bytes + 1, bytes + id_bytes) == string.sub(other, bytes + 1, bytes + id_bytes) do
    bytes = bytes + id_bytes
  end
  return bytes
end

-- Forget a session that ended with run `leaf` ('': none).
local function drop_run(leaf)
  while leaf ~= '' do
    local refs, parent = count_ref(leaf, -1)
    if refs > 0 then break end
    local pages = redis.call('HGET', KEYS[2], leaf)
    redis.call('HDEL', KEYS[3], string.sub(pages, 1, id_bytes))
    redis.call('HDEL', KEYS[2], leaf)
    redis.call('HDEL', KEYS[1], leaf)
    unlink_run(parent, leaf)
    leaf = parent
  end
end
