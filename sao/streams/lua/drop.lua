#!lua flags=allow-oom
-- Delete a dead letter, its payload and its routed experts, and count it.
-- KEYS: dead, totals, payload, routed experts    ARGV: entry id, counter, size
-- Returns {1, or 0 when it was no dead letter any more; the bytes of those that are left}.
local dropped = redis.call('XDEL', KEYS[1], ARGV[1])
if dropped == 1 then
  redis.call('DEL', KEYS[3], KEYS[4])
  redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
  redis.call('HINCRBY', KEYS[2], 'bytes', '-' .. ARGV[3])
end
return { dropped, tonumber(redis.call('HGET', KEYS[2], 'bytes') or '0') }
