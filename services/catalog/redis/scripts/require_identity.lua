-- Goes before a script: refuse it in a catalog of another id or version, an emptied one for example.
--
-- KEYS, after the script's own: the keys of the catalog's id and of its version.
-- ARGV, after the script's own: the id and the version that they must have.
-- Reply: that of the script, or the error 'CATALOGREPLACED', the id and version found ('-': none).
do
  local version, id = table.remove(ARGV), table.remove(ARGV)
  local version_key, id_key = table.remove(KEYS), table.remove(KEYS)
  local found_id, found_version = redis.call('GET', id_key), redis.call('GET', version_key)
  if found_id ~= id or found_version ~= version then
    return redis.error_reply('CATALOGREPLACED ' .. (found_id or '-') .. ' ' .. (found_version or '-'))
  end
end
