"""Blocks: shared by slots that begin alike, copied on write, and taken from the latest slot when they run out."""

from __future__ import annotations

import numpy as np
import pytest

from builder.runtime.generation.blocks import Blocks, Growth, OutOfBlocks
from builder.runtime.generation.engine import Engine
from builder.runtime.generation.scheduler import Limits
from tests.generation.executors import BLOCK, PagedSumExecutor, expected
from tests.generation.test_beams import Searched, best_answers
from tests.generation.test_engine import Asked


def engine_of(slots: int, blocks: int, max_length: int = 400, reuse: bool = True) -> tuple[Engine, PagedSumExecutor]:
    executor = PagedSumExecutor(slots, max_length, blocks)
    return Engine(executor, Limits(100, 64), reuse), executor


def test_a_table_grows_by_whole_blocks_and_gives_them_back() -> None:
    blocks = Blocks(slots=2, count=3, size=4)
    assert blocks.write(Growth(0, 0, 5)) == []
    assert (len(blocks.tables[0]), len(blocks.unused)) == (2, 1)
    assert blocks.missing([Growth(0, 5, 8), Growth(1, 0, 5)]) == 1
    with pytest.raises(OutOfBlocks, match="all 3 blocks"):
        blocks.write(Growth(1, 0, 5))
    blocks.truncate(0, 0)
    assert blocks.tables[0] == []
    assert blocks.missing([Growth(1, 4, 8)]) == 0


def test_who_writes_to_a_shared_block_gets_its_own() -> None:
    blocks = Blocks(slots=3, count=5, size=4)
    blocks.write(Growth(0, 0, 6))
    whole, part = blocks.tables[0]
    blocks.share(0, 1, 6)
    blocks.share(0, 2, 6)
    assert blocks.held_by([0, 1, 2]) == 2
    growths = [Growth(slot, 6, 7) for slot in range(3)]
    assert blocks.missing(growths) == 0, "the last of three needs no copy: two are made, and two are free or spare"
    assert [len(blocks.write(growth)) for growth in growths] == [1, 1, 0]
    assert [table[0] for table in blocks.tables] == [whole] * 3
    assert blocks.tables[2][1] == part
    assert len({table[1] for table in blocks.tables}) == 3


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("blocks", [13, 40])
def test_answers_are_those_each_prompt_gets_alone_however_few_blocks_there_are(blocks: int, reuse: bool) -> None:
    """30 requests of up to all tokens that 13 blocks hold, with common beginnings, arriving while others run."""
    generator = np.random.default_rng(2)
    engine, _ = engine_of(6, blocks, reuse=reuse)
    begin = generator.integers(0, 50, 70).tolist()
    requests = []
    for number in range(30):
        own = generator.integers(0, 50, int(generator.integers(1, 90))).tolist()
        requests.append(Asked([*begin, *own] if number % 3 else own, int(generator.integers(1, 90))))
        engine.submit(requests[-1].sequences)
        for _ in range(int(generator.integers(0, 9))):
            engine.step()
    engine.run_until_idle()
    for one in requests:
        assert one.tokens == expected(one.request.prompt, one.request.max_tokens)
        assert len(one.text) == one.request.max_tokens, "nothing is said twice"
        assert not one.errors
    assert (engine.stats.preemptions > 0) == (blocks < 40)
    assert (engine.stats.reused_tokens > 0) == reuse
    assert engine.stats.prompt_tokens == sum(len(one.request.prompt) for one in requests)
    assert engine.cache.free == 6


def test_memory_follows_use_not_the_longest_row() -> None:
    engine, executor = engine_of(slots=8, blocks=13)
    requests = [Asked([number, 2, 3], 20) for number in range(8)]
    for one in requests:
        engine.submit(one.sequences)
    engine.step()
    assert executor.calls[-1] == 8, "eight short rows at once in the memory of one long row"
    engine.run_until_idle()
    assert engine.stats.preemptions == 0


def test_a_prompt_is_read_in_the_calls_of_those_that_decode() -> None:
    engine, executor = engine_of(slots=4, blocks=40)
    short, long = Asked([1, 2, 3], 40), Asked([7] * 150, 5)
    engine.submit(short.sequences)
    engine.step()
    engine.submit(long.sequences)
    before = len(short.tokens)
    for steps in range(1, 4):  # pieces of 64 tokens
        engine.step()
        assert executor.calls[-1] == 2, "one call has the piece and the single token"
        assert len(executor.calls) == 1 + steps
        assert len(short.tokens) == before + steps
    assert len(long.tokens) == 1
    engine.run_until_idle()
    assert long.tokens == expected([7] * 150, 5)
    assert short.tokens == expected([1, 2, 3], 40)


def test_a_common_beginning_is_kept_once() -> None:
    engine, executor = engine_of(slots=4, blocks=13)
    begin = list(range(50)) * 4
    for number in range(4):
        engine.submit(Asked([*begin, number], 20).sequences)
        engine.step()
        engine.step()
        engine.step()
        engine.step()
    assert len(engine.scheduler.running) == 4
    assert executor.blocks.held_by(range(4)) <= 6 + 2 * 4, "201 tokens are seven blocks, six of them alike"
    assert engine.stats.preemptions == 0


def test_the_last_to_arrive_gives_way_and_goes_on_where_it_was() -> None:
    engine, _ = engine_of(slots=2, blocks=7, max_length=224)
    first, second = Asked([1, 2], 200), Asked([3, 4], 100)
    engine.submit(first.sequences)
    engine.submit(second.sequences)
    while not engine.stats.preemptions:
        engine.step()
    assert first.sequences[0] in engine.scheduler.running
    count = len(second.tokens)
    assert count > BLOCK
    engine.run_until_idle()
    assert first.tokens == expected([1, 2], 200)
    assert second.tokens == expected([3, 4], 100)
    assert len(second.text) == 100
    assert engine.stats.prompt_tokens == 4, "counted once"


@pytest.mark.parametrize("blocks", [7, 100])
def test_searches_share_blocks_and_begin_again_where_there_are_none(blocks: int) -> None:
    engine, _ = engine_of(slots=7, blocks=blocks, max_length=128)
    row = Asked(list(range(40)), 60)
    searches = [Searched([number + 5, *range(30)], 30, beams=3) for number in range(2)]
    engine.submit(row.sequences)
    for one in searches:
        engine.submit([one.beams])
    engine.run_until_idle()
    assert row.tokens == expected(row.request.prompt, 60)
    assert engine.stats.moved_positions == 0
    assert (engine.stats.preemptions > 0) == (blocks < 100)
    for one in searches:
        assert not one.errors
        assert one.answers == [tokens for _, tokens in best_answers(one.request.prompt, 3, 30)][:1]
