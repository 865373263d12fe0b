#!lua flags=allow-oom
-- Let go of answers that were never joined, and of old memories of those that were or have expired.
-- KEYS: answers, kept, joined, expired, since
-- ARGV: kept before (ms), remembered since (ms), how many are remembered, most to look at
-- Returns how many answers were never joined.
local unused = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. ARGV[1], 'LIMIT', 0, ARGV[4])) do
  if not redis.call('ZSCORE', KEYS[5], id) then
    redis.call('HDEL', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
    unused = unused + 1
  end
end
for _, memory in ipairs({ KEYS[3], KEYS[4] }) do
  local beyond = redis.call('ZCARD', memory) - tonumber(ARGV[3])
  local old = redis.call('ZRANGEBYSCORE', memory, '-inf', '(' .. ARGV[2], 'LIMIT', 0, ARGV[4])
  if beyond > #old then old = redis.call('ZRANGE', memory, 0, math.min(beyond, tonumber(ARGV[4])) - 1) end
  for _, id in ipairs(old) do
    redis.call('ZREM', memory, id)
    if memory == KEYS[3] and not redis.call('ZSCORE', KEYS[2], id) then redis.call('HDEL', KEYS[1], id) end
  end
end
return unused
