"""Ejection and the budget of retries, on a clock that the tests set."""

from __future__ import annotations

import math

from builder.serving.gateway.fleet.health import FAILURES, MAX_EJECTION_S, Health
from builder.serving.gateway.fleet.hedging import MIN_ANSWERS, RECENT_ANSWERS, AnswerTimes
from builder.serving.gateway.fleet.retry_budget import RESERVE, RESERVE_PER_S, RETRY_SHARE, RetryBudget


def test_health_ejects_after_failures_in_a_row() -> None:
    health = Health()
    for _ in range(2 * FAILURES):
        assert not any(health.record_failure(0.0) for _ in range(FAILURES - 1))
        health.record_success()
    ejections = [health.record_failure(0.0) for _ in range(FAILURES)]
    assert ejections == [*[False] * (FAILURES - 1), True]
    assert health.is_ejected(0.9)
    assert not health.is_ejected(1.0)


def test_ejections_grow_while_the_failures_continue() -> None:
    health, now, delays = Health(failures=FAILURES - 1), 0.0, []
    for _ in range(7):
        assert health.record_failure(now)
        assert not health.record_failure(now), "a request sent before the ejection does not prolong it"
        delays.append(health.backoff.due - now)
        now = health.backoff.due
    assert delays == [1, 2, 4, 8, 16, MAX_EJECTION_S, MAX_EJECTION_S]
    health.record_success()
    now += 100
    assert [health.record_failure(now) for _ in range(FAILURES)][-1]
    assert health.backoff.due == now + 1


def test_request_is_sent_again_after_a_percentile_of_recent_answers() -> None:
    times = AnswerTimes(90)
    for number in range(MIN_ANSWERS):
        assert times.hedge_after_s("embeds", 100) == math.inf
        times.record("embeds", 100, 1.0 + number)
    assert times.hedge_after_s("embeds", 100) == 1.0 + 0.9 * MIN_ANSWERS
    assert times.hedge_after_s("embeds", 10_000) == math.inf, "long requests take longer"
    for _ in range(RECENT_ANSWERS):
        times.record("embeds", 100, 0.5)
    assert times.hedge_after_s("embeds", 100) == 0.5
    times.keep_only(set())
    assert times.hedge_after_s("embeds", 100) == math.inf


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget()
    allowed = 0
    for _ in range(1000):
        budget.add_request(0.0)
        allowed += budget.take_retry(0.0)
    assert abs(allowed - (RESERVE + RETRY_SHARE * 1000)) <= 1


def test_retry_reserve_fills_with_time() -> None:
    budget = RetryBudget()
    while budget.take_retry(0.0):
        pass
    assert not budget.take_retry(0.9 / RESERVE_PER_S)
    assert budget.take_retry(1.0 / RESERVE_PER_S)
    assert sum(budget.take_retry(1000.0) for _ in range(1000)) == RESERVE
