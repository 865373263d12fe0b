#!lua
-- Put a dead letter back on its stream, as a new entry, and count it as unconsumed again; or change nothing.
-- KEYS: dead, to, unconsumed, totals, payload
-- ARGV: entry id, trajectory id, counter, size, then field, value, ...
-- No allow-oom flag: what is requeued is new work, and none is taken at the memory bound.
local dead, entry, id = KEYS[1], ARGV[1], ARGV[2]
if #redis.call('XRANGE', dead, entry, entry) == 0 then return 'gone' end
if redis.call('EXISTS', KEYS[5]) == 0 then return 'no_payload' end

redis.call('XDEL', dead, entry)
redis.call('XADD', KEYS[2], '*', '_id', id, unpack(ARGV, 5))
redis.call('SADD', KEYS[3], id)
redis.call('HINCRBY', KEYS[4], ARGV[3], 1)
redis.call('HINCRBY', KEYS[4], 'bytes', '-' .. ARGV[4])
return 'requeued'
