#!lua flags=allow-oom
-- Bring back the preferences of a board that lost them: records, versions, what is scheduled, the hold.
-- KEYS: board, preferences, changes, schedule, requests
-- ARGV: newest record, newest version, when that was asked for, hold or '', how many versions, of records,
--       then number, text, ... of versions, of records, of what is scheduled
-- Returns 1, or 0 when the board is at the newest ones or beyond.
local board = KEYS[1]
local seq = tonumber(redis.call('HGET', board, 'preference-seq') or '0')
local current = tonumber(redis.call('HGET', board, 'preference') or '0')
if seq >= tonumber(ARGV[1]) and current >= tonumber(ARGV[2]) then return 0 end
local versions, records = tonumber(ARGV[5]), tonumber(ARGV[6])
redis.call('DEL', KEYS[4], KEYS[5])
for i = 7, #ARGV, 2 do
  local number = (i - 7) / 2
  local key = number < versions and KEYS[2] or number < versions + records and KEYS[3] or KEYS[4]
  redis.call('HSET', key, ARGV[i], ARGV[i + 1])
end
redis.call('HSET', board, 'preference-seq', ARGV[1], 'preference', ARGV[2], 'preference-stored', ARGV[3])
redis.call('HDEL', board, 'preference-hold')
if ARGV[4] ~= '' then redis.call('HSET', board, 'preference-hold', ARGV[4]) end
return 1
