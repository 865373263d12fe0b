#!lua flags=allow-oom
-- Extend the leases that this worker still holds. Allowed at the memory bound: nothing grows.
-- KEYS: lease-expiry, leases    ARGV: worker, now (ms), time to live (ms), then slot, attempt of each lease
-- Returns slot, attempt, expires (ms), deadline (ms) of each renewed lease, in one flat list.
local worker, now, ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local renewed = {}
for i = 4, #ARGV, 2 do
  local slot = ARGV[i]
  local held = redis.call('HGET', KEYS[2], slot)
  local until_ms = redis.call('ZSCORE', KEYS[1], slot)
  if held and until_ms and tonumber(until_ms) > now then
    local attempt, deadline, holder = string.match(held, '^(%d+):(%d+):(.*)$')
    if attempt == ARGV[i + 1] and holder == worker then
      local expires = string.format('%d', math.min(now + ttl, tonumber(deadline)))
      redis.call('ZADD', KEYS[1], expires, slot)
      for _, value in ipairs({ slot, attempt, expires, deadline }) do renewed[#renewed + 1] = value end
    end
  end
end
return renewed
