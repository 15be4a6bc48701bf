"""Slots: near each other, remembering what they held, and never handed out twice."""

from __future__ import annotations

import pytest

from builder.runtime.generation.cache import SlotTable


def test_a_prompt_goes_where_its_beginning_is() -> None:
    table = SlotTable(3, 20)
    first = table.place([1, 2, 3, 4])
    table.tokens[first.slot] = [1, 2, 3, 4, 5]
    table.release(first.slot)
    other = table.place([9, 9])
    table.tokens[other.slot] = [9, 9]
    again = table.place([1, 2, 3, 4, 5, 6])
    assert (again.slot, again.source, again.reused) == (first.slot, first.slot, 5)


def test_a_running_slot_is_copied_from() -> None:
    table = SlotTable(2, 20)
    first = table.place([1, 2, 3])
    table.tokens[first.slot] = [1, 2, 3]
    second = table.place([1, 2, 7])
    assert second.slot != first.slot
    assert (second.source, second.reused) == (first.slot, 2)


def test_the_last_token_is_always_left_to_run() -> None:
    table = SlotTable(1, 20)
    table.tokens[0] = [1, 2, 3]
    assert table.place([1, 2, 3]).reused == 2


def test_without_reuse_nothing_is_remembered() -> None:
    table = SlotTable(1, 20, reuse=False)
    table.tokens[0] = [1, 2, 3]
    assert table.place([1, 2, 3]).reused == 0


def test_running_slots_stay_together() -> None:
    table = SlotTable(8, 20)
    taken = [table.place([number]).slot for number in range(4)]
    assert max(taken) - min(taken) == 3
    table.release(taken[1])
    assert table.place([50]).slot == taken[1], "a hole is filled first"


def test_a_hole_is_closed_from_the_end() -> None:
    table = SlotTable(4, 20)
    slots = sorted(table.place([number]).slot for number in range(3))
    table.tokens[slots[2]] = [2, 8, 8]
    table.release(slots[0])
    table.release(slots[1])
    assert table.hole() is None, "one slot has no holes"
    table.taken[slots[0]] = True
    assert table.hole() == (slots[2], slots[1])
    table.move(slots[2], slots[1])
    assert table.tokens[slots[1]] == [2, 8, 8]
    assert table.taken[slots[1]]
    assert not table.taken[slots[2]]


@pytest.mark.parametrize("held", [3, 20])
def test_a_bystander_is_written_where_it_does_not_hurt(held: int) -> None:
    table = SlotTable(1, 20)
    table.tokens[0] = list(range(held))
    position = table.spare_position(0)
    assert position == min(held, 19)
    assert table.tokens[0] == list(range(position)), "what is overwritten is forgotten"
