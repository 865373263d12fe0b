#!lua flags=allow-oom
-- Bring back the preferences of a board that lost them: every version under its number, the newest one current.
-- KEYS: board, preferences    ARGV: version, document, ... ascending
-- Returns 1, or 0 when the board is at the newest one or beyond.
local newest = ARGV[#ARGV - 1]
if tonumber(redis.call('HGET', KEYS[1], 'preference') or '0') >= tonumber(newest) then return 0 end
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], 'preference', newest)
return 1
