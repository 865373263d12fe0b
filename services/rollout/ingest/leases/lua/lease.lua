#!lua
-- Give out slots: those whose lease ran out first, then new ones, never more than the limit allows.
-- KEYS: cursor, frontier, winners, lease-expiry, leases, unconsumed, board
-- ARGV: worker, most wanted, limit, now (ms), time to live (ms), deadline (ms)
-- Returns slot, attempt, expires (ms) of each grant, in one flat list.
local cursor_key, winners, expiry, leases = KEYS[1], KEYS[3], KEYS[4], KEYS[5]
local worker, now, deadline = ARGV[1], ARGV[4], ARGV[6]
-- As in append.lua: before a trainer has restored what is done, done slots would be given out again.
if redis.call('HEXISTS', KEYS[7], 'epoch') == 0 then
  return redis.error_reply('NOEPOCH no trainer has claimed this store; one that starts claims and restores it')
end
local expires = string.format('%d', math.min(tonumber(now) + tonumber(ARGV[5]), tonumber(deadline)))

local live = redis.call('ZCOUNT', expiry, '(' .. now, '+inf')
local free = math.min(tonumber(ARGV[2]), tonumber(ARGV[3]) - live - redis.call('SCARD', KEYS[6]))
if free <= 0 then return {} end

local slots = redis.call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, free)
if #slots < free then
  local cursor = math.max(tonumber(redis.call('GET', cursor_key) or '0'), tonumber(redis.call('GET', KEYS[2]) or '0'))
  while #slots < free do
    local slot = string.format('%d', cursor)
    if not redis.call('ZSCORE', winners, slot) then slots[#slots + 1] = slot end
    cursor = cursor + 1
  end
  redis.call('SET', cursor_key, string.format('%d', cursor))
end

local granted = {}
for _, slot in ipairs(slots) do
  local attempt = 1
  local before = redis.call('HGET', leases, slot)
  if before then attempt = tonumber(string.match(before, '^(%d+):')) + 1 end
  redis.call('HSET', leases, slot, attempt .. ':' .. deadline .. ':' .. worker)
  redis.call('ZADD', expiry, expires, slot)
  granted[#granted + 1] = slot
  granted[#granted + 1] = tostring(attempt)
  granted[#granted + 1] = expires
end
return granted
