#!lua
-- Make one trajectory durable, release its lease, mark it unconsumed; or change nothing.
-- KEYS: stream, payload, seen bucket, unconsumed, frontier, winners, lease-expiry, leases, routed experts, board
-- ARGV: id, payload, slot, seen time to live (ms), routed experts (empty: none), then field, value, ...
-- No allow-oom flag: at the memory bound the server refuses the whole script before its first line.
local stream, payload, seen, unconsumed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local frontier_key, winners, expiry, leases = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local id, slot = ARGV[1], ARGV[3]

-- A store that lost its file knows neither ids nor done slots: it would take what was trained long ago for new.
if redis.call('HEXISTS', KEYS[10], 'epoch') == 0 then
  return redis.error_reply('NOEPOCH no trainer has claimed this store; one that starts claims and restores it')
end

if redis.call('SISMEMBER', seen, id) == 1 then return 'duplicate' end
local frontier = tonumber(redis.call('GET', frontier_key) or '0')
if tonumber(slot) < frontier or redis.call('ZSCORE', winners, slot) then return 'superseded' end

redis.call('SET', payload, ARGV[2])
if ARGV[5] ~= '' then redis.call('SET', KEYS[9], ARGV[5]) end
redis.call('XADD', stream, '*', '_id', id, unpack(ARGV, 6))
redis.call('SADD', seen, id)
redis.call('PEXPIRE', seen, ARGV[4])
redis.call('SADD', unconsumed, id)

redis.call('ZREM', expiry, slot)
redis.call('HDEL', leases, slot)
redis.call('ZADD', winners, slot, slot)
local start = frontier
while redis.call('ZREM', winners, string.format('%d', frontier)) == 1 do frontier = frontier + 1 end
if frontier > start then redis.call('SET', frontier_key, string.format('%d', frontier)) end
return 'accepted'
