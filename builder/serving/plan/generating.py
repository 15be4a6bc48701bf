"""Plan a decode loop, in which prompts and steps share one engine, and running answers share each step.

While R answers run, a step takes a + b R ms and gives R tokens. As many answers run at once as are needed to give the
requested tokens in the time that prompts leave (Little's law).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from builder.common.memory import (
    BYTES_PER_VALUE,
    CONVERSION_MEMORY,
    CONVERTED_COPIES,
    MAX_CONVERTED_BYTES,
    cache_bytes,
    largest_call,
    state_bytes,
    widest_layer,
)
from builder.engines import graph_engine
from builder.options import Capacity, Load
from builder.runtime.contract import LayerShape
from builder.serving.plan.lines import PROCESS, ModelPlan, PlanLine, SpeedPlan, megabytes, memory_lines, number
from builder.serving.plan.needs import BIAS, CONVERSION, ModelNeeds
from builder.serving.plan.speeds import DecodingSpeed, decoding_cost

MAX_UTILISATION = 0.85
SIGMAS = 2.33  # standard deviations that 99 of 100 draws of a normal distribution stay below
MIN_PREFILL, MAX_PREFILL = 32, 2048


def plan_generating(capacity: Capacity, load: Load, needs: ModelNeeds) -> ModelPlan:
    """Return the slots, prefill tokens, queue, cache and shared memory that `load` needs."""
    cost = decoding_cost(needs.latency or {})
    lines = [PlanLine("threads", "all cores: one loop", str(capacity.cores))]
    settings: dict[str, Any] = {"threads": capacity.cores}
    slots, busy = capacity.slots, None
    lacking: list[str] = []
    if cost is not None:
        speed = _speed(capacity, load, needs, cost)
        busy, slots, lacking = speed.cores, speed.rows, [*speed.lacking]
        lines += speed.lines
        settings.update(speed.settings)
    length = slot_length(load, needs)
    tokens = largest_call(settings.get("serving.prefill_tokens", capacity.prefill_tokens), slots)
    besides = needs.besides_cache(tokens, length)
    if needs.paged:
        cache, cache_lines = _shared_cache(load, needs, slots, length)
    else:
        rest = needs.weights + sum(besides.values()) + PROCESS
        cache, cache_lines = _cache(capacity, rest, needs, slots, length)
    copies = f"{CONVERTED_COPIES} x {length} positions x {widest_layer(needs.layers)} keys or values x 4 bytes"
    of_call = {
        BIAS: f"{tokens} tokens of a call x {length} positions x {needs.bias} bytes",
        CONVERSION: f"{CONVERSION_MEMORY} x ({copies}, {megabytes(MAX_CONVERTED_BYTES)} at most), of a layer",
    }
    lines += cache_lines
    lines += [PlanLine(name, formula, megabytes(besides[name])) for name, formula in of_call.items() if besides[name]]
    if needs.paged:
        settings["cache_gb"] = math.ceil(cache / 1e6) / 1e3
    elif not needs.cross:
        settings["max_length"] = length
    settings["slots"] = slots
    requests, limits = slots + capacity.serving.queue.size, capacity.serving.limits
    memory, size, shared = memory_lines(
        1, needs.weights, requests, limits.request_bytes, needs.answer_bytes, besides={"cache": cache, **besides}
    )
    if size > capacity.memory:
        excess = megabytes(size - capacity.memory)
        lacking.append(
            f"weights and cache exceed the {megabytes(capacity.memory)} that may be used, by {excess}. What "
            f"helps: a max_length below {length}, fewer slots, --cache int8, or --precision int8"
        )
    return ModelPlan(
        capacity.name, (*lines, *memory), settings, size, shared, busy, 0, tuple(lacking), (needs.measured,)
    )


@dataclass(frozen=True)
class _Demand:
    """Work of one second of `load`. `prompts`: milliseconds to read its prompts; `tokens`: number to generate."""

    load: Load
    cost: DecodingSpeed

    @property
    def prompts(self) -> float:
        return self.load.requests_per_s * self.load.tokens * self.cost.prompt_ms

    @property
    def tokens(self) -> float:
        return self.load.requests_per_s * self.load.answer_tokens

    @property
    def spare_ms(self) -> float:
        """Milliseconds of each second left for the fixed cost of steps; 0 or less if the load is too high."""
        return 1000 * MAX_UTILISATION - self.prompts - self.tokens * self.cost.step.part

    @property
    def running(self) -> float:
        """Average number of answers that run at once."""
        alone = self.tokens * self.cost.step.ms(1) / 1000
        return max(alone, self.tokens * self.cost.step.call / self.spare_ms)

    @property
    def between_ms(self) -> float:
        """Milliseconds between two tokens of an answer."""
        return self.cost.step.ms(self.running) / (1 - self.prompts / 1000)

    @property
    def first_ms(self) -> float:
        """Milliseconds from the start of a request, after its wait in the queue, to its first token."""
        return self.load.tokens * self.cost.prompt_ms + self.cost.step.ms(self.running)

    @property
    def busy(self) -> float:
        """Share of the time in which the loop works."""
        shared = max(1.0, self.running)  # answers per step; an answer that runs alone has steps to itself
        return min(1.0, (self.prompts + self.tokens * self.cost.step.ms(shared) / shared) / 1000)


def _speed(capacity: Capacity, load: Load, needs: ModelNeeds, cost: DecodingSpeed) -> SpeedPlan:
    """Return how many answers run at once, how fast they are, and how long the queue is."""
    demand = _Demand(load, cost)
    rate, step, prompt_ms = number(load.requests_per_s), cost.step, number(cost.prompt_ms)
    demanded = [
        PlanLine("a step", needs.measured, f"{number(step.call)} ms + {number(step.part)} ms a running answer"),
        PlanLine("prompts", f"{rate}/s x {load.tokens} tokens x {prompt_ms} ms", f"{number(demand.prompts)} ms/s"),
        PlanLine("tokens", f"{rate}/s x {load.answer_tokens}", f"{number(demand.tokens)}/s"),
    ]
    if demand.spare_ms <= 0:
        return SpeedPlan(demanded, {}, [_overload_problem(demand)], float(capacity.cores), capacity.slots)
    slots = max(1, math.ceil(demand.running + SIGMAS * math.sqrt(demand.running)))
    prefill, chunk = _prefill(capacity, load, cost, demand.running)
    timeout_ms = capacity.serving.queue.waiting_ms
    wait = max(slots, math.ceil(load.requests_per_s * timeout_ms / 1000))
    queue = PlanLine("queue", f"{number(load.requests_per_s)}/s x {timeout_ms / 1000:g} s of waiting", str(wait))
    settings = {"serving.prefill_tokens": prefill, "serving.queue.max_size": wait}
    lines = [*demanded, *_concurrency_lines(demand, slots), chunk, queue]
    return SpeedPlan(lines, settings, _too_slow_problems(demand), capacity.cores * demand.busy, slots)


def _concurrency_lines(demand: _Demand, slots: int) -> list[PlanLine]:
    """Return lines for the number of answers that run at once, and their speed."""
    load, step, running = demand.load, demand.cost.step, number(demand.running)
    tokens, prompts = number(demand.tokens), number(demand.prompts)
    rest = f"{1000 * MAX_UTILISATION:.0f} - {prompts} - {tokens} x {number(step.part)}"
    at_once = f"{tokens} x {number(step.call)} ms / ({rest})"
    return [
        PlanLine("answers at once", at_once, f"{running} on average"),
        PlanLine("slots", f"{running} + {SIGMAS} x sqrt({running})", str(slots)),
        PlanLine(
            "between tokens",
            f"{number(step.ms(demand.running))} ms / (1 - {prompts}/1000)",
            f"{number(demand.between_ms)} ms",
        ),
        PlanLine(
            "first token",
            f"{load.tokens} x {number(demand.cost.prompt_ms)} ms + a step",
            f"{number(demand.first_ms)} ms",
        ),
    ]


def _overload_problem(demand: _Demand) -> str:
    load, cost = demand.load, demand.cost
    holds = 1000 * MAX_UTILISATION / (load.tokens * cost.prompt_ms + load.answer_tokens * cost.step.part)
    return (
        f"prompts and tokens need {number(demand.prompts + demand.tokens * cost.step.part)} ms of each second, however "
        f"many run at once; it holds {number(holds)} requests/s. What helps: shorter prompts or answers, a lower "
        "precision, more cores, or a copy of the model on another machine"
    )


def _too_slow_problems(demand: _Demand) -> list[str]:
    """Return a sentence for each limit that is exceeded, with the remedy."""
    limits = (
        ("first token", demand.load.first_token_ms, demand.first_ms, "shorter prompts"),
        ("between tokens", demand.load.between_tokens_ms, demand.between_ms, "fewer requests a second"),
    )
    return [
        f"{name}: {number(value)} ms, not {number(limit)} ms. What helps: {helps}, a lower precision or more cores"
        for name, limit, value, helps in limits
        if limit is not None and value > limit
    ]


def _prefill(capacity: Capacity, load: Load, cost: DecodingSpeed, running: float) -> tuple[int, PlanLine]:
    """Return the prompt tokens to read between two steps, so that running answers do not wait too long."""
    configured = capacity.prefill_tokens
    if load.between_tokens_ms is None:
        return configured, PlanLine("prefill_tokens", "as asked: no between_tokens_ms bounds it", str(configured))
    tokens_that_fit = (load.between_tokens_ms - cost.step.ms(running)) / cost.prompt_ms
    tokens = min(MAX_PREFILL, max(MIN_PREFILL, int(tokens_that_fit + 1e-6)))
    formula = (
        f"({number(load.between_tokens_ms)} ms - {number(cost.step.ms(running))} ms) / {number(cost.prompt_ms)} ms, "
        f"{MIN_PREFILL} to {MAX_PREFILL}"
    )
    return tokens, PlanLine("prefill_tokens", formula, str(tokens))


def slot_length(load: Load, needs: ModelNeeds) -> int:
    """Return the tokens of a slot."""
    if needs.cross:
        return needs.length
    return min(needs.length, (load.longest or needs.length) + load.answer_tokens)


def _cache(capacity: Capacity, rest: int, needs: ModelNeeds, slots: int, length: int) -> tuple[int, list[PlanLine]]:
    """Return the bytes of a cache with its own slot per sequence, as the build reserves it.

    `rest`: bytes of everything else.
    """
    width = BYTES_PER_VALUE[needs.cache]
    states = state_bytes(needs.layers)
    of_slot = cache_bytes(needs.layers, 1, length, width) + states
    formula = f"{length} tokens x {number(_values(needs.layers))} keys and values x {width} bytes"
    formula += f" + {megabytes(states)} of states" if states else ""
    lines = [PlanLine("a slot", formula, megabytes(of_slot))]
    if needs.cross:
        read = cache_bytes(needs.cross, 1, needs.source, width)
        formula = f"{needs.source} tokens x {number(_values(needs.cross))} x {width} bytes"
        lines.append(PlanLine("what a slot reads", formula, megabytes(read)))
        of_slot += read
    most = max(0, int((capacity.memory - rest) // of_slot))
    free = f"({megabytes(capacity.memory)} - {megabytes(rest)} of the rest) / {megabytes(of_slot)}"
    lines += [
        PlanLine("cache", f"{slots} slots x {megabytes(of_slot)}", megabytes(slots * of_slot)),
        PlanLine("most slots", free, number(most)),
    ]
    return slots * of_slot, lines


def _values(layers: Sequence[LayerShape]) -> int:
    return cache_bytes(layers, 1, 1, 1)


def _shared_cache(load: Load, needs: ModelNeeds, slots: int, length: int) -> tuple[int, list[PlanLine]]:
    """Return the bytes of a cache of shared blocks: the average of all sequences, and one of the greatest length."""
    engine = graph_engine(needs.engine)
    block, size = engine.block_bytes(needs.layers, needs.cache), engine.block_tokens(needs.layers)
    average, longest = (-(-tokens // size) for tokens in (load.tokens + load.answer_tokens, length))
    blocks, states = slots * average + longest, engine.state_bytes(needs.layers)
    formula = f"{slots} x {average} blocks + {longest} of the longest text, {size} tokens each, x {megabytes(block)}"
    formula += f" + {slots} x {megabytes(states)} of states" if states else ""
    cache = blocks * block + slots * states
    return cache, [PlanLine("cache", formula, megabytes(cache))]
