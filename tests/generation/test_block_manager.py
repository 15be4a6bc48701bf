"""BlockManager: prefixes are shared, blocks copied on write, and the latest slot preempted when they run out."""

from __future__ import annotations

import numpy as np
import pytest

from builder.runtime.generation.block_manager import BlockManager, OutOfBlocks, PendingWrite
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.scheduler import SchedulerLimits
from tests.generation.asked import Asked
from tests.generation.executors import BLOCK, PagedSumExecutor, expected
from tests.generation.test_beams import Searched, best_answers


def loop_of(slots: int, blocks: int, max_length: int = 400, reuse: bool = True) -> tuple[DecodeLoop, PagedSumExecutor]:
    executor = PagedSumExecutor(slots, max_length, blocks)
    return DecodeLoop(executor, SchedulerLimits(100, 64), reuse), executor


def test_block_table_grows_and_shrinks_by_blocks() -> None:
    blocks = BlockManager(slots=2, num_blocks=3, block_size=4)
    assert blocks.prepare_write(PendingWrite(0, 0, 5)) == []
    assert (len(blocks.block_tables[0]), len(blocks.free_blocks)) == (2, 1)
    assert blocks.count_missing([PendingWrite(0, 5, 8), PendingWrite(1, 0, 5)]) == 1
    with pytest.raises(OutOfBlocks, match="all 3 blocks"):
        blocks.prepare_write(PendingWrite(1, 0, 5))
    blocks.truncate(0, 0)
    assert blocks.block_tables[0] == []
    assert blocks.count_missing([PendingWrite(1, 4, 8)]) == 0


def test_shared_block_is_copied_on_write() -> None:
    blocks = BlockManager(slots=3, num_blocks=5, block_size=4)
    blocks.prepare_write(PendingWrite(0, 0, 6))
    whole, part = blocks.block_tables[0]
    blocks.share(0, 1, 6)
    blocks.share(0, 2, 6)
    assert blocks.count_used([0, 1, 2]) == 2
    writes = [PendingWrite(slot, 6, 7) for slot in range(3)]
    assert blocks.count_missing(writes) == 0, "the last of three needs no copy: two are made, and two are free or spare"
    assert [len(blocks.prepare_write(write)) for write in writes] == [1, 1, 0]
    assert [table[0] for table in blocks.block_tables] == [whole] * 3
    assert blocks.block_tables[2][1] == part
    assert len({table[1] for table in blocks.block_tables}) == 3


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("blocks", [13, 40])
def test_paged_answers_equal_those_of_each_prompt_alone(blocks: int, reuse: bool) -> None:
    """30 requests of up to the capacity of 13 blocks, with common prefixes, arrive while others run."""
    generator = np.random.default_rng(2)
    loop, _ = loop_of(6, blocks, reuse=reuse)
    begin = generator.integers(0, 50, 70).tolist()
    requests = []
    for number in range(30):
        own = generator.integers(0, 50, int(generator.integers(1, 90))).tolist()
        requests.append(Asked([*begin, *own] if number % 3 else own, int(generator.integers(1, 90))))
        loop.submit(requests[-1].sequences)
        for _ in range(int(generator.integers(0, 9))):
            loop.step()
    loop.run_until_idle()
    for one in requests:
        assert one.tokens == expected(one.request.prompt, one.request.max_tokens)
        assert len(one.text) == one.request.max_tokens, "nothing is said twice"
        assert not one.errors
    assert (loop.stats.preemptions > 0) == (blocks < 40)
    assert (loop.stats.reused_tokens > 0) == reuse
    assert loop.stats.prompt_tokens == sum(len(one.request.prompt) for one in requests)
    assert loop.cache.free_slots == 6


def test_tokens_of_a_paged_call_stay_within_the_limit() -> None:
    """Regression: one decoded token beside a full piece of a prompt made OpenVINO's call 27% slower."""
    loop, executor = loop_of(slots=40, blocks=100)
    running = [Asked([9, number], 20) for number in range(3)]
    for one in running:
        loop.submit(one.sequences)
    loop.step()
    long = Asked(list(range(50)) * 3, 1)
    loop.submit(long.sequences)
    executor.tokens.clear()
    loop.run_until_idle()
    assert executor.tokens[:4] == [64, 64, 31, 3], "three of them are decoded"
    assert long.tokens == expected(long.request.prompt, 1)


def test_prompts_have_half_of_a_call_beside_many_decoded_rows() -> None:
    loop, executor = loop_of(slots=61, blocks=200)
    for number in range(60):
        loop.submit(Asked([9, number], 20).sequences)
    for _ in range(4):  # until all of them decode
        loop.step()
    loop.submit(Asked(list(range(40)), 1).sequences)
    executor.tokens.clear()
    loop.run_until_idle()
    assert executor.tokens[:2] == [92, 68]


@pytest.mark.parametrize(
    ("prompt", "decoded", "tokens"),
    [
        (37, 0, [32, 5]),  # in a tile of their own, 5 tokens would cost nearly as much as 16
        (37, 3, [32, 11]),
        (41, 0, [41]),
        (10, 0, [10]),
        (10, 12, [22]),  # less than half of the prompt would run
        (61, 3, [64, 3]),
    ],
)
def test_few_tokens_beyond_full_tiles_wait_for_the_next_call(prompt: int, decoded: int, tokens: list[int]) -> None:
    loop, executor = loop_of(slots=20, blocks=100)
    loop.scheduler.tile_tokens = 16
    for number in range(decoded):
        loop.submit(Asked([9, number], 20).sequences)
    for _ in range(4):  # until all of them decode
        loop.step()
    last = Asked(list(range(prompt)), 1)
    loop.submit(last.sequences)
    executor.tokens.clear()
    loop.run_until_idle()
    assert executor.tokens[: len(tokens)] == tokens
    assert last.tokens == expected(last.request.prompt, 1)


def test_paged_memory_follows_use_not_the_longest_row() -> None:
    loop, executor = loop_of(slots=8, blocks=13)
    requests = [Asked([number, 2, 3], 20) for number in range(8)]
    for one in requests:
        loop.submit(one.sequences)
    loop.step()
    assert executor.calls[-1] == 8, "eight short rows at once in the memory of one long row"
    loop.run_until_idle()
    assert loop.stats.preemptions == 0


def test_paged_prefill_runs_in_the_calls_of_decoding() -> None:
    loop, executor = loop_of(slots=4, blocks=40)
    short, long = Asked([1, 2, 3], 40), Asked([7] * 150, 5)
    loop.submit(short.sequences)
    loop.step()
    loop.submit(long.sequences)
    before = len(short.tokens)
    for steps in range(1, 4):  # pieces of 64 tokens
        loop.step()
        assert executor.calls[-1] == 2, "one call has the piece and the single token"
        assert len(executor.calls) == 1 + steps
        assert len(short.tokens) == before + steps
    assert len(long.tokens) == 1
    loop.run_until_idle()
    assert long.tokens == expected([7] * 150, 5)
    assert short.tokens == expected([1, 2, 3], 40)


def test_paged_common_prefix_is_stored_once() -> None:
    loop, executor = loop_of(slots=4, blocks=13)
    begin = list(range(50)) * 4
    for number in range(4):
        loop.submit(Asked([*begin, number], 20).sequences)
        loop.step()
        loop.step()
        loop.step()
        loop.step()
    assert len(loop.scheduler.running) == 4
    assert executor.blocks.count_used(range(4)) <= 6 + 2 * 4, "201 tokens are seven blocks, six of them alike"
    assert loop.stats.preemptions == 0


def test_last_sequence_is_preempted_and_resumes() -> None:
    loop, _ = loop_of(slots=2, blocks=7, max_length=224)
    first, second = Asked([1, 2], 200), Asked([3, 4], 100)
    loop.submit(first.sequences)
    loop.submit(second.sequences)
    while not loop.stats.preemptions:
        loop.step()
    assert first.sequences[0] in loop.scheduler.running
    count = len(second.tokens)
    assert count > BLOCK
    loop.run_until_idle()
    assert first.tokens == expected([1, 2], 200)
    assert second.tokens == expected([3, 4], 100)
    assert len(second.text) == 100
    assert loop.stats.prompt_tokens == 4, "counted once"


@pytest.mark.parametrize("blocks", [7, 100])
def test_preempted_search_starts_over(blocks: int) -> None:
    loop, _ = loop_of(slots=7, blocks=blocks, max_length=128)
    row = Asked(list(range(40)), 60)
    searches = [Searched([number + 5, *range(30)], 30, beams=3) for number in range(2)]
    loop.submit(row.sequences)
    for one in searches:
        loop.submit([one.beams])
    loop.run_until_idle()
    assert row.tokens == expected(row.request.prompt, 60)
    assert loop.stats.moved_positions == 0
    assert (loop.stats.preemptions > 0) == (blocks < 100)
    for one in searches:
        assert not one.errors
        assert one.answers == [tokens for _, tokens in best_answers(one.request.prompt, 3, 30)][:1]
