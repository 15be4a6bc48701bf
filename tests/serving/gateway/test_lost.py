"""Lost calls are recognised, on a clock that the looks advance."""

from __future__ import annotations

import asyncio

import pytest

from builder.serving.gateway import lost
from builder.serving.gateway.lost import Losses, Lost


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(lost, "time", clock)
    monkeypatch.setattr(lost, "LOOK_S", 0.001)
    return clock


def test_nothing_is_lost_as_long_as_its_model_is_away(clock: FakeClock) -> None:
    """The model loads for minutes, or one of several servers is away and another answers this call."""

    async def answer() -> str:
        running: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def ready() -> bool:
            clock.now += lost.LOST_S / 2
            if clock.now > 5 * lost.LOST_S:
                running.set_result("late")
            return False

        async with asyncio.timeout(60):
            await Losses().answered(running, "embeds", ready)
        return running.result()

    assert asyncio.run(answer()) == "late"


def test_a_call_is_lost_when_its_model_is_back_for_long(clock: FakeClock) -> None:
    async def ready() -> bool:
        clock.now += lost.LOST_S / 2
        return clock.now > 5 * lost.LOST_S

    async def lost_at() -> float:
        async with asyncio.timeout(60):
            with pytest.raises(Lost):
                await Losses().answered(asyncio.get_running_loop().create_future(), "embeds", ready)
        return clock.now

    assert asyncio.run(lost_at()) > 6 * lost.LOST_S


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_stream_that_goes_silent_while_its_model_is_away_is_lost_soon(clock: FakeClock, comes_back: bool) -> None:
    """It holds for any later state of the model."""

    async def ready() -> bool:
        clock.now += lost.SILENT_S / 4
        return comes_back and clock.now > lost.SILENT_S / 4

    async def lost_at() -> float:
        async with asyncio.timeout(60):
            with pytest.raises(Lost):
                await Losses().answered(asyncio.get_running_loop().create_future(), "writes", ready, 0.0, begun=True)
        return clock.now

    assert lost.SILENT_S < asyncio.run(lost_at()) < 2 * lost.SILENT_S


@pytest.mark.parametrize("begun", [True, False])
def test_a_stream_is_given_its_time_from_when_it_is_waited_for(clock: FakeClock, begun: bool) -> None:
    """Its reader was slow while its model was away, or it is a whole answer, which takes minutes."""
    patience = lost.SILENT_S if begun else lost.GENERATED_S
    losses, clock.now = Losses(), 1000.0
    losses.away["writes"] = 500.0 if begun else clock.now

    async def ready() -> bool:
        clock.now += patience / 4
        return True

    async def lost_at() -> float:
        async with asyncio.timeout(60):
            with pytest.raises(Lost):
                await losses.answered(asyncio.get_running_loop().create_future(), "writes", ready, 400.0, begun)
        return clock.now

    assert patience < asyncio.run(lost_at()) - 1000 < 2 * patience


def test_a_stream_may_be_silent_while_its_model_is_ready(clock: FakeClock) -> None:
    async def answer() -> str:
        running: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def ready() -> bool:
            clock.now += lost.LOST_S
            if clock.now > 5 * lost.LOST_S:
                running.set_result("late")
            return True

        async with asyncio.timeout(60):
            await Losses().answered(running, "writes", ready, 0.0, begun=True)
        return running.result()

    assert asyncio.run(answer()) == "late"


@pytest.mark.usefixtures("clock")
def test_an_answer_waits_for_no_look() -> None:
    """A busy server takes long to say whether a model is ready."""

    async def answer() -> str:
        running: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def ready() -> bool:
            running.set_result("at once")
            return await asyncio.get_running_loop().create_future()

        async with asyncio.timeout(60):
            await Losses().answered(running, "embeds", ready)
        return running.result()

    assert asyncio.run(answer()) == "at once"
