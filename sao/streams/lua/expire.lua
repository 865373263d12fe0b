#!lua flags=allow-oom
-- Move one trajectory from the waiting room to the dead letters, if this very parking of it is still there; count it.
-- KEYS: waiting, since, ready, dead, totals, payload, routed experts, expired, kept, joined
-- ARGV: trajectory id, since (ms), now (ms), whether it must be answered ('1') or must not be ('0'), stream, reason,
--       fields (JSON), counter, a letter's own bytes
-- Returns the bytes of all dead letters, or 0 when it is not there, or answered where it must not be.
local id, ready, reason, fields = ARGV[1], KEYS[3], ARGV[6], ARGV[7]
if tonumber(redis.call('ZSCORE', KEYS[2], id) or '-1') ~= tonumber(ARGV[2]) then return 0 end
if redis.call('SISMEMBER', ready, id) ~= tonumber(ARGV[4]) then return 0 end

local stored = redis.call('STRLEN', KEYS[6]) + redis.call('STRLEN', KEYS[7])
local size = string.format('%d', tonumber(ARGV[9]) + stored + #reason + #fields)
redis.call('HDEL', KEYS[1], id)
redis.call('ZREM', KEYS[2], id)
redis.call('SREM', ready, id)
redis.call('XADD', KEYS[4], '*', '_id', id, 'stream', ARGV[5], 'attempt', '1', 'reason', reason, 'fields', fields,
  'size', size)
if ARGV[4] == '1' then
  redis.call('ZREM', KEYS[9], id)
  redis.call('ZADD', KEYS[10], ARGV[3], id)
else
  redis.call('ZADD', KEYS[8], ARGV[3], id)
end
redis.call('HINCRBY', KEYS[5], ARGV[8], 1)
return redis.call('HINCRBY', KEYS[5], 'bytes', size)
