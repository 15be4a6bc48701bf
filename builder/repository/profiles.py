"""TensorRT's optimisation profiles: which calls an engine takes, and which it is fastest at. Pure functions of shapes.

A shape is (rows, tokens of a row). A profile takes the shapes between its least and its most, in both at once.
Profiles: NVIDIA TensorRT developer guide, "Working with dynamic shapes".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from builder.spec import Profile

SHORT = 128  # tokens; where texts may be longer, those up to here get a profile of their own

Shape = tuple[int, int]


@dataclass(frozen=True)
class Calls:
    """The calls a front model makes: at most so many rows, tokens a row, and padded tokens; a single row always."""

    rows: int
    length: int
    token_budget: int

    def include(self, shape: Shape) -> bool:
        rows, length = shape
        fits = rows == 1 or rows * length <= self.token_budget
        return 1 <= rows <= self.rows and 1 <= length <= self.length and fits


def default_profiles(calls: Calls) -> tuple[Profile, ...]:
    """One profile tuned for short texts and one for long ones; each takes every call.

    A profile is tuned for texts of half the length it is meant for, as many as the token budget allows.
    """
    meant = [calls.length] if calls.length <= SHORT else [SHORT, calls.length]
    tuned = [max(1, length // 2) for length in meant]
    return tuple(
        Profile(opt=(max(1, min(calls.rows, calls.token_budget // length)), length), max=(calls.rows, calls.length))
        for length in tuned
    )


def takes(profile: Profile, shape: Shape) -> bool:
    """Whether an engine can run `shape` in `profile`."""
    return all(low <= size <= high for low, size, high in zip(profile.min, shape, profile.max, strict=True))


def uncovered(profiles: Sequence[Profile], calls: Calls) -> Shape | None:
    """The smallest of `calls` that no profile takes; None where each is taken by one.

    Coverage changes only where a profile begins and after its end, so only those places are looked at.
    """
    rows = sorted({1, *(p.min[0] for p in profiles), *(p.max[0] + 1 for p in profiles)})
    lengths = sorted({1, *(p.min[1] for p in profiles), *(p.max[1] + 1 for p in profiles)})
    shapes = [(row, length) for row in rows for length in lengths]
    missed = [s for s in shapes if calls.include(s) and not any(takes(profile, s) for profile in profiles)]
    return missed[0] if missed else None


def groups(profiles: Sequence[Profile], calls: Calls) -> tuple[tuple[int, ...], ...]:
    """The profiles of each instance group, by number: one a group where each takes every call, else all in one.

    Triton hands a call to whichever instance is free, and only within an instance picks the profile that fits.
    """
    each = all(uncovered([profile], calls) is None for profile in profiles)
    numbers = range(len(profiles))
    return tuple((number,) for number in numbers) if each else (tuple(numbers),)


def input_shapes(profile: Profile, inputs: Sequence[str], of_tokens: Collection[str]) -> dict[str, dict[str, Shape]]:
    """min, opt and max of each input. What is not of tokens is the task's own, from one to as many as tokens."""
    sides: Mapping[str, Shape] = {"min": profile.min, "opt": profile.opt, "max": profile.max}
    return {
        name: {side: shape if name in of_tokens or side == "max" else (shape[0], 1) for side, shape in sides.items()}
        for name in inputs
    }
