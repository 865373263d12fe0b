#!lua flags=allow-oom
-- Claim the next trainer epoch, above a given one; or nothing when the store is not as it was found.
-- KEYS: board, versions    ARGV: an epoch to be above, epoch that was found or '', version that must be there or ''
-- Returns the epoch, or 0.
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if ARGV[2] ~= '' and tonumber(ARGV[2]) ~= epoch then return 0 end
if ARGV[3] ~= '' and redis.call('HEXISTS', KEYS[2], ARGV[3]) == 0 then return 0 end
epoch = math.max(epoch, tonumber(ARGV[1])) + 1
redis.call('HSET', KEYS[1], 'epoch', string.format('%d', epoch))
return epoch
