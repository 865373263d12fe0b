#!lua flags=allow-oom
-- Take over deliveries that nobody has settled for a while.
-- KEYS: stream    ARGV: group, consumer, idle (ms), count
-- Returns { {entry id, {field, value, ...}, attempt}, ... }
local stream, group, consumer, count = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[4])
local cursor, found = '0-0', {}
repeat
  local reply = redis.call('XAUTOCLAIM', stream, group, consumer, ARGV[3], cursor, 'COUNT', count - #found)
  cursor = reply[1]
  for _, entry in ipairs(reply[2]) do
    local row = redis.call('XPENDING', stream, group, entry[1], entry[1], 1)[1]
    found[#found + 1] = { entry[1], entry[2], row[4] }
  end
until cursor == '0-0' or #found >= count
return found
