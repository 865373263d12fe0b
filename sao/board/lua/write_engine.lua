#!lua flags=allow-oom
-- Store one engine's facts, or forget the engine, unless a newer weights service has started.
-- KEYS: board, engines    ARGV: epoch, engine id, facts or '' to forget
-- Returns {newest epoch, who claimed it}; the epoch is above ARGV[1] when nothing was changed.
local newest = tonumber(redis.call('HGET', KEYS[1], 'weights_epoch') or '0')
if tonumber(ARGV[1]) >= newest then
  if ARGV[3] == '' then redis.call('HDEL', KEYS[2], ARGV[2]) else redis.call('HSET', KEYS[2], ARGV[2], ARGV[3]) end
end
return { newest, redis.call('HGET', KEYS[1], 'weights_owner') or '' }
