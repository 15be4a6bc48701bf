"""Detection of lost calls, on a clock that the readiness checks advance."""

from __future__ import annotations

import asyncio

import pytest

from builder.serving.gateway import pending_calls
from builder.serving.gateway.pending_calls import BackendLost, LossDetector, NotReady


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(pending_calls, "time", clock)
    monkeypatch.setattr(pending_calls, "READY_CHECK_INTERVAL_S", 0.001)
    return clock


async def test_call_is_not_lost_while_its_model_is_not_ready(clock: FakeClock) -> None:
    """The model loads for minutes, or one of several servers is away and another answers this call."""
    running: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready() -> bool:
        clock.now += pending_calls.LOST_AFTER_S / 2
        if clock.now > 5 * pending_calls.LOST_AFTER_S:
            running.set_result("late")
        return False

    async with asyncio.timeout(60):
        await LossDetector().wait(running, "embeds", ready)
    assert running.result() == "late"


async def test_call_is_lost_after_its_model_is_ready_again(clock: FakeClock) -> None:
    async def ready() -> bool:
        clock.now += pending_calls.LOST_AFTER_S / 2
        return clock.now > 5 * pending_calls.LOST_AFTER_S

    async with asyncio.timeout(60):
        with pytest.raises(BackendLost):
            await LossDetector().wait(asyncio.get_running_loop().create_future(), "embeds", ready)
    assert clock.now > 6 * pending_calls.LOST_AFTER_S


@pytest.mark.parametrize("comes_back", [True, False])
async def test_silent_stream_of_a_model_that_was_not_ready_is_lost(clock: FakeClock, comes_back: bool) -> None:
    """It holds for any later state of the model."""

    async def ready() -> bool:
        clock.now += pending_calls.SILENT_STREAM_LOST_AFTER_S / 4
        return comes_back and clock.now > pending_calls.SILENT_STREAM_LOST_AFTER_S / 4

    async with asyncio.timeout(60):
        with pytest.raises(BackendLost):
            await LossDetector().wait(
                asyncio.get_running_loop().create_future(), "writes", ready, -1.0, has_started=True
            )
    assert pending_calls.SILENT_STREAM_LOST_AFTER_S < clock.now < 2 * pending_calls.SILENT_STREAM_LOST_AFTER_S


@pytest.mark.parametrize("begun", [True, False])
async def test_stream_loss_counts_from_the_wait(clock: FakeClock, begun: bool) -> None:
    """Its reader was slow while its model was away, or it is a whole answer, which takes minutes."""
    patience = pending_calls.SILENT_STREAM_LOST_AFTER_S if begun else pending_calls.UNSTARTED_STREAM_LOST_AFTER_S
    detector, clock.now = LossDetector(), 1000.0
    detector.last_not_ready["writes"] = NotReady(sent := 500.0 if begun else clock.now, sent)

    async def ready() -> bool:
        clock.now += patience / 4
        return True

    async with asyncio.timeout(60):
        with pytest.raises(BackendLost):
            await detector.wait(asyncio.get_running_loop().create_future(), "writes", ready, 400.0, begun)
    assert patience < clock.now - 1000 < 2 * patience


async def test_call_is_not_lost_by_a_check_that_was_sent_before_it(clock: FakeClock) -> None:
    """The model was loaded meanwhile, and the call was sent to it. A busy server answers the check late."""
    detector, answered = LossDetector(), asyncio.Event()
    running: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def not_ready() -> bool:
        await answered.wait()
        return False

    async def ready() -> bool:
        clock.now += pending_calls.LOST_AFTER_S
        if clock.now > 5 * pending_calls.LOST_AFTER_S:
            running.set_result("late")
        return True

    earlier = asyncio.ensure_future(detector.wait(asyncio.Future(), "embeds", not_ready))
    while not detector.checks:
        await asyncio.sleep(0)
    earlier.cancel()  # its check goes on
    clock.now += 1
    call = asyncio.ensure_future(detector.wait(running, "embeds", ready))
    await asyncio.sleep(0)
    clock.now += 1
    answered.set()
    async with asyncio.timeout(60):
        await call
    assert running.result() == "late"


async def test_silent_stream_of_a_ready_model_is_not_lost(clock: FakeClock) -> None:
    running: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready() -> bool:
        clock.now += pending_calls.LOST_AFTER_S
        if clock.now > 5 * pending_calls.LOST_AFTER_S:
            running.set_result("late")
        return True

    async with asyncio.timeout(60):
        await LossDetector().wait(running, "writes", ready, 0.0, has_started=True)
    assert running.result() == "late"


@pytest.mark.usefixtures("clock")
async def test_answer_does_not_wait_for_a_readiness_check() -> None:
    """A busy server takes long to say whether a model is ready."""
    running: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready() -> bool:
        running.set_result("at once")
        return await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(60):
        await LossDetector().wait(running, "embeds", ready)
    assert running.result() == "at once"
