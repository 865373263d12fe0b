#!lua flags=allow-oom
-- Add to the slots that are done: a store that came back without its file, or with an older one, knows too few.
-- KEYS: frontier, winners, lease-expiry, leases    ARGV: a frontier, then done slots above it
local known = tonumber(redis.call('GET', KEYS[1]) or '0')
local frontier = math.max(known, tonumber(ARGV[1]))
for i = 2, #ARGV do
  if tonumber(ARGV[i]) >= frontier then redis.call('ZADD', KEYS[2], ARGV[i], ARGV[i]) end
end
while redis.call('ZREM', KEYS[2], string.format('%d', frontier)) == 1 do frontier = frontier + 1 end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', '(' .. string.format('%d', frontier))
if frontier > known then redis.call('SET', KEYS[1], string.format('%d', frontier)) end

for _, slot in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  if tonumber(slot) < frontier or redis.call('ZSCORE', KEYS[2], slot) then
    redis.call('ZREM', KEYS[3], slot)
    redis.call('HDEL', KEYS[4], slot)
  end
end
return 1
