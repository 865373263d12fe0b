#!lua flags=allow-oom
-- Claim the next epoch of the weights service, or say that an epoch still serves, also to a store that has lost it.
-- KEYS: board    ARGV: epoch that serves, or 0 to claim one; who it is; an epoch to be above
-- Returns {newest epoch, who claimed it}.
local newest = tonumber(redis.call('HGET', KEYS[1], 'weights_epoch') or '0')
local epoch = tonumber(ARGV[1])
if epoch == 0 then epoch = math.max(newest, tonumber(ARGV[3])) + 1 end
if epoch >= newest then
  redis.call('HSET', KEYS[1], 'weights_epoch', string.format('%d', epoch), 'weights_owner', ARGV[2])
  newest = epoch
end
return { newest, redis.call('HGET', KEYS[1], 'weights_owner') }
