"""Limit the requests and tokens a minute of each key, in this process or, through a Valkey, over several gateways."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.settings import GatewaySettings

MAX_CONNECTIONS = 32  # to Valkey, each for one call at a time
CALL_TIMEOUT_S = 0.5
RETRY_S = 1.0  # between calls to a Valkey that does not answer
PREFIX = "build-repo:limits"

# The time at which each bucket in KEYS is full again, in microseconds; a bucket that is full has no entry.
# ARGV: 1 to refuse if one of them is empty, then for each bucket its size, which it refills in a minute, and what to
# take from it. Returns the number of an empty bucket, or 0, and the microseconds until it has one again.
SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local full_at = {}
for i, key in ipairs(KEYS) do
  local each_us = 60000000 / ARGV[2 * i]
  local full = math.max(tonumber(redis.call('GET', key) or 0), now)
  local wait_us = full + each_us - now - 60000000
  if ARGV[1] == '1' and wait_us > 0 then
    return {i, math.ceil(wait_us)}
  end
  full_at[i] = full + each_us * ARGV[2 * i + 1]
end
for i, key in ipairs(KEYS) do
  if full_at[i] > now then
    redis.call('SET', key, string.format('%.0f', full_at[i]), 'PX', math.ceil((full_at[i] - now) / 1000))
  end
end
return {0, 0}
"""
log = logging.getLogger(__name__)


class RateLimiter:
    """Rate limit of each key: a token bucket that refills evenly.

    An answer may cost more than the bucket holds; the key is then refused until it has refilled.
    """

    def __init__(self, per_minute: int, unit: str, now: Callable[[], float] = time.monotonic) -> None:
        self.per_minute, self.unit, self.now = per_minute, unit, now
        self.buckets: dict[str, tuple[float, float]] = {}

    def refuse(self, key: str) -> None:
        """Raise ApiError 429 if the key's bucket is empty."""
        available = self._available(key)
        if available < 1:
            raise self.refusal((1 - available) * 60 / self.per_minute)

    def refusal(self, wait_s: float) -> ApiError:
        """Return the ApiError 429 for a key whose bucket is empty for so long."""
        message = f"this key may use {self.per_minute} {self.unit} a minute; try again in {wait_s:.0f} s"
        return ApiError(429, message, code="rate_limit_exceeded", retry_after=wait_s)

    def spend(self, key: str, amount: int) -> None:
        """Take `amount` from the key's bucket."""
        self.buckets[key] = (self._available(key) - amount, self.now())

    def _available(self, key: str) -> float:
        level, since = self.buckets.get(key, (float(self.per_minute), self.now()))
        return min(self.per_minute, level + (self.now() - since) * self.per_minute / 60)


class RateLimits:
    """Limits of a gateway. With `shared` they apply to all gateways together, and while that is away to each."""

    def __init__(self, settings: GatewaySettings, shared: SharedBuckets | None = None) -> None:
        requests, tokens = settings.requests_per_minute, settings.tokens_per_minute
        self.requests = RateLimiter(requests, "requests") if requests else None
        self.tokens = RateLimiter(tokens, "tokens") if tokens else None
        self.shared = shared

    async def admit(self, key: str) -> None:
        """Count a request of a key. Raises ApiError 429 beyond a limit."""
        costs = [(limiter, cost) for limiter, cost in ((self.requests, 1), (self.tokens, 0)) if limiter]
        for limiter, _ in costs:
            limiter.refuse(key)  # a share of what all gateways count, so never before the shared bucket is empty
        if self.shared and costs:
            await self.shared.take(key, costs, refuse=True)
        if self.requests:
            self.requests.spend(key, 1)

    async def spend_tokens(self, key: str, amount: int) -> None:
        """Count the tokens of an answer."""
        if self.tokens and amount:
            self.tokens.spend(key, amount)
            if self.shared:
                await self.shared.take(key, [(self.tokens, amount)], refuse=False)


class SharedBuckets:
    """Token buckets in the Valkey, or Redis 5 and later, at `url`. Raises ValueError for another address.

    While it does not answer it is asked once every RETRY_S, and every call counts as within the limits.
    """

    def __init__(self, url: str, now: Callable[[], float] = time.monotonic) -> None:
        from valkey.asyncio import BlockingConnectionPool, Valkey

        timeouts = {"socket_timeout": CALL_TIMEOUT_S, "socket_connect_timeout": CALL_TIMEOUT_S}
        self.pool = BlockingConnectionPool.from_url(
            url, max_connections=MAX_CONNECTIONS, timeout=CALL_TIMEOUT_S, **timeouts
        )
        self.script, self.now = Valkey(connection_pool=self.pool).register_script(SCRIPT), now
        self.is_away, self.ask_at = False, -math.inf

    async def take(self, key: str, costs: Sequence[tuple[RateLimiter, int]], refuse: bool) -> None:
        """Take the cost of each limit from the bucket of a key. Raises ApiError 429 if one is empty, with `refuse`."""
        from valkey.exceptions import ValkeyError

        if self.is_away:
            if self.now() < self.ask_at:
                return
            self.ask_at = self.now() + RETRY_S  # others do not wait for the answer
        names = [f"{PREFIX}:{{{key}}}:{limiter.unit}" for limiter, _ in costs]  # in braces: one slot of a cluster
        amounts = [number for limiter, cost in costs for number in (limiter.per_minute, cost)]
        try:
            empty, wait_us = await self.script(names, [int(refuse), *amounts])
        except (ValkeyError, OSError) as error:
            if not self.is_away:
                log.warning("each gateway has limits of its own while Valkey does not answer: %s", error)
            self.is_away, self.ask_at = True, self.now() + RETRY_S
            return
        if self.is_away:
            log.warning("Valkey answers again: all gateways share the limits")
            self.is_away = False
        if empty:
            raise costs[empty - 1][0].refusal(wait_us / 1e6)


@asynccontextmanager
async def rate_limits(settings: GatewaySettings) -> AsyncIterator[RateLimits]:
    """Yield the limits that `settings` asks for."""
    shared = SharedBuckets(settings.limits) if settings.limits else None
    try:
        yield RateLimits(settings, shared)
    finally:
        if shared is not None:
            await shared.pool.aclose()
