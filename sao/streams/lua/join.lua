#!lua flags=allow-oom
-- Move one trajectory from the waiting room to a stream, if this very parking of it is still there.
-- KEYS: waiting, since, to, ready, kept, joined
-- ARGV: trajectory id, since (ms), now (ms), whether it must be answered ('1') or must not be ('0'), then field, value, ...
-- Returns 1, or 0 when it is not there, or answered where it must not be.
local id, ready = ARGV[1], KEYS[4]
if tonumber(redis.call('ZSCORE', KEYS[2], id) or '-1') ~= tonumber(ARGV[2]) then return 0 end
if redis.call('SISMEMBER', ready, id) ~= tonumber(ARGV[4]) then return 0 end

redis.call('HDEL', KEYS[1], id)
redis.call('ZREM', KEYS[2], id)
redis.call('SREM', ready, id)
redis.call('XADD', KEYS[3], '*', '_id', id, unpack(ARGV, 5))
if ARGV[4] == '1' then
  redis.call('ZREM', KEYS[5], id)
  redis.call('ZADD', KEYS[6], ARGV[3], id)
end
return 1
