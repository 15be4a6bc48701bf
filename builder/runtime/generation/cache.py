"""Where the keys and values of running sequences lie: an arena of slots, and what each slot still remembers.

A decode step runs over one contiguous range of slots, so running sequences are kept close together. A slot that was
freed keeps its content until it is used again: a later prompt that begins with the same tokens takes it over.
Knows token ids and slots; knows nothing about tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """A slot for a prompt. The first `reused` tokens need no prefill, once copied from `source` if that is another."""

    slot: int
    source: int
    reused: int


class SlotTable:
    """Which tokens' keys and values are in which slot, and which slots are taken."""

    def __init__(self, slots: int, max_length: int, reuse: bool = True) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.taken = [False] * slots
        self.last_used = [0] * slots
        self.max_length = max_length
        self.reuse = reuse
        self.clock = 0

    @property
    def free(self) -> int:
        return self.taken.count(False)

    def range(self) -> tuple[int, int]:
        """The smallest range of slots with all that are taken."""
        taken = [slot for slot, used in enumerate(self.taken) if used]
        return (taken[0], taken[-1] + 1) if taken else (0, 0)

    def place(self, prompt: Sequence[int]) -> Placement:
        """Take a free slot for `prompt`: near the others, then the one that remembers most, then the oldest.

        At least the last token of the prompt is always left to run, for its logits.
        """
        common = [common_length(prompt, tokens) if self.reuse else 0 for tokens in self.tokens]
        common = [min(length, len(prompt) - 1) for length in common]
        first, last = self.range()

        def order(slot: int) -> tuple[int, int, int]:
            outside = 0 if first == last else max(first - slot, slot - last + 1, 0)  # how much wider
            return outside, -common[slot], self.last_used[slot]

        slot = min((slot for slot, used in enumerate(self.taken) if not used), key=order)
        source = slot if common[slot] == max(common) else common.index(max(common))
        reused = common[source]
        self.clock += 1
        self.taken[slot], self.last_used[slot] = True, self.clock
        self.tokens[slot] = list(prompt[:reused])
        return Placement(slot, source, reused)

    def take(self) -> int:
        """Take a free slot, the nearest to the others, for a beam that will be copied there."""
        return self.place([0]).slot

    def release(self, slot: int) -> None:
        """Free `slot`; what it holds may be reused."""
        self.taken[slot] = False

    def hole(self) -> "tuple[int, int] | None":
        """A taken slot at the end of the range and a free slot inside it, for the one to move into the other."""
        first, last = self.range()
        inside = [slot for slot in range(first, last) if not self.taken[slot]]
        return (last - 1, inside[0]) if inside else None

    def move(self, source: int, target: int) -> None:
        """`target` takes over what `source` holds."""
        self.tokens[target] = self.tokens[source]
        self.tokens[source] = []
        self.taken[source], self.taken[target] = False, True
        self.last_used[target] = self.last_used[source]

    def spare_position(self, slot: int) -> int:
        """A position of `slot` that a step over the whole range may overwrite."""
        if len(self.tokens[slot]) >= self.max_length:
            del self.tokens[slot][self.max_length - 1 :]
        return len(self.tokens[slot])


def common_length(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for index, (a, b) in enumerate(zip(prompt, tokens)):
        if a != b:
            return index
    return min(len(prompt), len(tokens))
