"""List the values to try: a few of each setting, around the model's own and within the machine's resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from builder.common.memory import BYTES_PER_VALUE, cache_bytes, state_bytes
from builder.repository.settings import Settings, read_settings
from builder.runtime.contract import EncoderServing, GenerationServing, load

DELAYS_US = (0, 500, 1000, 2000, 5000)
BATCHES = (8, 16, 32, 64, 128)
BUDGETS = (512, 1024, 2048, 4096, 8192)
CALL_COSTS = (8, 16, 32, 64)
SLOTS = (4, 8, 16, 32, 64)
PREFILLS = (32, 64, 128, 256, 512, 1024)
SHARED = "instances x threads"  # one choice, because a build refuses more of both than there are cores

Space = Mapping[str, Sequence[object]]


def space_of(version: Path, cores: int, memory: float) -> Space:
    """Return the values of each setting to try, including the model's own. Raises SpecError.

    `memory`: bytes that its cache may take.
    """
    serving, now = load(version), read_settings(version)
    if isinstance(serving, EncoderServing):
        budgets = [tokens for tokens in BUDGETS if tokens >= serving.max_length]
        return {
            SHARED: _shares(cores, now),
            "max_batch_size": _with(BATCHES, now["max_batch_size"]),
            "max_queue_delay_us": _with(DELAYS_US, now["max_queue_delay_us"]),
            "serving.token_budget": _with(budgets, now["serving.token_budget"]),
            "serving.call_cost": _with(CALL_COSTS, now["serving.call_cost"]),
        }
    space: dict[str, Sequence[object]] = {"threads": _with(_halves(cores), now["threads"] or cores)}
    if serving.arena.blocks is None:
        space["slots"] = _with(_slots(serving, memory), now["slots"])
    if "serving.prefill_tokens" in now:
        space["serving.prefill_tokens"] = _with(PREFILLS, now["serving.prefill_tokens"])
    return space


def choices(settings: Settings, cores: int, space: Space) -> dict[str, object]:
    """Return `settings` as a point of `space`."""
    first: dict[str, object] = {name: settings[name] for name in space if name != SHARED and name != "threads"}
    if SHARED in space:
        first[SHARED] = _share(settings["instances"], settings["threads"] or max(1, cores // settings["instances"]))
    else:
        first["threads"] = settings["threads"] or cores
    return first


def settings_of(point: Mapping[str, object]) -> dict[str, int]:
    """Return the settings of a point."""
    settings = {name: int(str(value)) for name, value in point.items() if name != SHARED}
    if SHARED in point:
        instances, threads = str(point[SHARED]).split("x")
        settings.update(instances=int(instances), threads=int(threads))
    return settings


def _shares(cores: int, now: Settings) -> list[str]:
    """Return all pairs that leave less than half of the cores idle, and the current pair."""
    fit = [(i, t) for i in range(1, cores + 1) for t in _halves(cores) if cores // 2 < i * t <= cores or i * t == 1]
    current = (now["instances"], now["threads"] or max(1, cores // now["instances"]))
    return [_share(*pair) for pair in sorted({*fit, current})]


def _share(instances: int, threads: int) -> str:
    return f"{instances}x{threads}"


def _halves(cores: int) -> list[int]:
    """Return the number of cores, a half of it, a quarter and so on."""
    halves = [cores]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    return halves


def _slots(serving: GenerationServing, memory: float) -> list[int]:
    """Return the numbers of slots whose cache and states fit, as the build counts them, and suffice for a search."""
    arena, source = serving.arena, serving.source
    width = BYTES_PER_VALUE[arena.dtype]
    each = cache_bytes(arena.layers, 1, arena.length, width) + state_bytes(arena.layers)
    each += 0 if source is None else cache_bytes(source.layers, 1, source.max_length, width)
    least = 1 if source is None and serving.beams == arena.slots else serving.beams
    return [slots for slots in SLOTS if slots >= least and slots * each <= memory]


def _with(values: Sequence[int], now: int) -> list[int]:
    return sorted({*values, now})
