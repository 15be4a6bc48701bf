"""TensorRT's optimisation profiles: the calls that an engine takes, and those that it is fastest at.

Pure functions of shapes. A shape is (rows, tokens of a row). A profile takes the shapes between its smallest and its
largest, in both dimensions at once. Profiles: NVIDIA TensorRT developer guide, "Working with dynamic shapes".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from builder.common.errors import SpecError
from builder.options import Profile

SHORT_TEXT_TOKENS = 128  # tokens; if texts may be longer, those up to this length get a profile of their own
MIN_BUCKET_TOKENS = 16  # tokens; shorter calls cost a GPU as much

Shape = tuple[int, int]


@dataclass(frozen=True)
class Calls:
    """Calls that a front model makes: its maximum rows, tokens of a row and padded tokens; a single row always fits."""

    rows: int
    length: int
    token_budget: int

    def most_rows(self, length: int) -> int:
        """Return the most rows of a call whose texts have `length` tokens."""
        return max(1, min(self.rows, self.token_budget // length))

    def include(self, shape: Shape) -> bool:
        rows, length = shape
        fits = rows == 1 or rows * length <= self.token_budget
        return 1 <= rows <= self.rows and 1 <= length <= self.length and fits


def profiles_of(profiles: tuple[Profile, ...], calls: Calls, plan: bool) -> tuple[Profile, ...]:
    """Return the requested `profiles`, or the default ones. Raises SpecError if one of `calls` would fit none.

    ONNX Runtime's TensorRT, which is not a `plan`, runs profile 0 alone, so it has one
    (tensorrt_execution_provider.cc).
    """
    if not plan and len(profiles) > 1:
        raise SpecError(
            f"ONNX Runtime's TensorRT runs the first profile alone, and tensorrt.profiles has {len(profiles)}: give "
            "one that takes every call, or leave --engine out for a plan"
        )
    if not profiles:
        profiles = default_profiles(calls) if plan else (covering_profile(calls),)
    missed = uncovered(profiles, calls)
    if missed is not None:
        raise SpecError(
            f"no profile of tensorrt.profiles takes {missed[0]} rows of {missed[1]} tokens; together they must take "
            f"all calls up to {calls.rows} rows, {calls.length} tokens a row and {calls.token_budget} tokens a call "
            "(--max-batch-size, --max-length, serving.token_budget)"
        )
    return profiles


def default_profiles(calls: Calls) -> tuple[Profile, ...]:
    """Return a profile for short texts, and as many for longer ones as the token budget needs; no length is in two.

    TensorRT reserves memory for the largest shape of a profile, the most rows of the longest text, though no call is
    larger than the token budget. Profiles for longer texts therefore end where that shape would have more than twice
    as many tokens.
    """
    profiles = [_profile(calls, 1, min(SHORT_TEXT_TOKENS, calls.length))]
    while (longest := profiles[-1].max[1]) < calls.length:
        rows = calls.most_rows(longest + 1)
        profiles.append(
            _profile(calls, longest + 1, min(calls.length, max(longest + 1, 2 * calls.token_budget // rows)))
        )
    return tuple(profiles)


def covering_profile(calls: Calls) -> Profile:
    """Return the one profile that takes every call, for an engine that has no other."""
    return _profile(calls, 1, calls.length)


def _profile(calls: Calls, shortest: int, longest: int) -> Profile:
    """Return a profile tuned for texts of half the `longest` length, as many as the token budget allows."""
    length = max(shortest, longest // 2)
    return Profile(min=(1, shortest), opt=(calls.most_rows(length), length), max=(calls.most_rows(shortest), longest))


def largest_calls(profile: Profile, calls: Calls) -> tuple[Shape, ...]:
    """Return the calls of `calls` that `profile` takes with the most rows, and with the longest rows."""
    rows = min(calls.rows, profile.max[0])
    length = min(calls.length, profile.max[1])
    most = (rows, min(length, max(profile.min[1], calls.token_budget // rows)))
    longest = (min(rows, max(profile.min[0], calls.token_budget // length, 1)), length)
    return tuple(shape for shape in dict.fromkeys([most, longest]) if calls.include(shape) and takes(profile, shape))


def buckets(calls: Calls) -> tuple[Shape, ...]:
    """Return the shapes that calls are padded to if only captured ones run as CUDA graphs: powers of two and the ends.

    Sorted by tokens, so that the first that fits a call is the smallest.
    """
    rows = [*_doublings(1, calls.rows), calls.rows]
    lengths = [*_doublings(min(MIN_BUCKET_TOKENS, calls.length), calls.length), calls.length]
    shapes = {(row, length) for row in rows for length in lengths}
    return tuple(sorted(filter(calls.include, shapes), key=lambda shape: (shape[0] * shape[1], shape)))


def _doublings(first: int, end: int) -> list[int]:
    sizes = [first]
    while sizes[-1] * 2 < end:
        sizes.append(sizes[-1] * 2)
    return sizes


def takes(profile: Profile, shape: Shape) -> bool:
    """Return True if an engine can run `shape` in `profile`."""
    return all(low <= size <= high for low, size, high in zip(profile.min, shape, profile.max, strict=True))


def uncovered(profiles: Sequence[Profile], calls: Calls) -> Shape | None:
    """Return the smallest of `calls` that no profile takes; None if each is taken by one.

    Coverage changes only where a profile begins and after its end, so only those places are looked at.
    """
    rows = sorted({1, *(p.min[0] for p in profiles), *(p.max[0] + 1 for p in profiles)})
    lengths = sorted({1, *(p.min[1] for p in profiles), *(p.max[1] + 1 for p in profiles)})
    shapes = [(row, length) for row in rows for length in lengths]
    missed = [s for s in shapes if calls.include(s) and not any(takes(profile, s) for profile in profiles)]
    return missed[0] if missed else None


def input_shapes(profile: Profile, inputs: Sequence[str], of_tokens: Collection[str]) -> dict[str, dict[str, Shape]]:
    """Return the min, opt and max shape of each input.

    The second axis of an input that is not of tokens is the task's own: from one to as many as tokens.
    """
    sides: Mapping[str, Shape] = {"min": profile.min, "opt": profile.opt, "max": profile.max}
    return {
        name: {side: shape if name in of_tokens or side == "max" else (shape[0], 1) for side, shape in sides.items()}
        for name in inputs
    }
