#!lua flags=allow-oom
-- Forget dead letters that are over their time, with payloads and routed experts, and count them; in the same step the
-- others are written anew, since a deleted entry's text stays in its stream's block until every entry of it is deleted.
-- KEYS: dead, totals, then payload and routed experts of each    ARGV: entry id, counter, size of each
-- Returns how many were still dead letters. Letters keep their entry ids; no group reads this stream.
local gone = 0
for i = 1, #ARGV / 3 do
  if redis.call('XDEL', KEYS[1], ARGV[3 * i - 2]) == 1 then
    redis.call('DEL', KEYS[2 * i + 1], KEYS[2 * i + 2])
    redis.call('HINCRBY', KEYS[2], ARGV[3 * i - 1], 1)
    redis.call('HINCRBY', KEYS[2], 'bytes', '-' .. ARGV[3 * i])
    gone = gone + 1
  end
end
if gone > 0 then
  local rows = redis.call('XRANGE', KEYS[1], '-', '+')
  redis.call('DEL', KEYS[1])
  for _, row in ipairs(rows) do redis.call('XADD', KEYS[1], row[1], unpack(row[2])) end
end
return gone
