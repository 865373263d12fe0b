#!lua flags=allow-oom
-- Make one piece of feedback durable, or say why it is not taken (sao.streams.room.Heard).
-- KEYS: seen bucket, since, unconsumed, answers, ready, kept, joined, expired
-- ARGV: trajectory id, value, answer (the value, a line feed, JSON), now (ms), most that are kept
-- Allowed at the memory bound: what is answered can leave the room, and what is kept has a bound.
local id = ARGV[1]
local waits = redis.call('ZSCORE', KEYS[2], id)
local known = redis.call('HGET', KEYS[4], id)
if known then
  if string.match(known, '^[^\n]*') ~= ARGV[2] then return 'conflict' end
  if waits then return 'waiting' end
  if redis.call('ZSCORE', KEYS[7], id) then return 'joined' end
  return 'kept'
end
if waits then
  redis.call('HSET', KEYS[4], id, ARGV[3])
  redis.call('ZADD', KEYS[6], ARGV[4], id)
  redis.call('SADD', KEYS[5], id)
  return 'waiting'
end
if redis.call('SISMEMBER', KEYS[3], id) == 0 then
  if redis.call('ZSCORE', KEYS[8], id) then return 'expired' end
  return redis.call('SISMEMBER', KEYS[1], id) == 1 and 'consumed' or 'unknown'
end
if redis.call('ZCARD', KEYS[6]) - redis.call('SCARD', KEYS[5]) >= tonumber(ARGV[5]) then return 'full' end
redis.call('HSET', KEYS[4], id, ARGV[3])
redis.call('ZADD', KEYS[6], ARGV[4], id)
return 'kept'
