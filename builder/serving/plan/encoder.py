"""Plan an encoder, whose batches form by themselves while the previous one runs.

A request waits for the running batch, then for its own. That is a batch-service queue without a delay (Neuts, 1967);
builder.serving.plan.waiting simulates it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from builder.options import Capacity, Load
from builder.runtime.contract import Batching
from builder.serving.plan.lines import ModelPlan, PlanLine, SpeedPlan, memory_lines, number, power_of_two
from builder.serving.plan.needs import ModelNeeds
from builder.serving.plan.speeds import CallCost, encoder_cost
from builder.serving.plan.waiting import full_share, latencies

MAX_UTILISATION = 0.8  # highest average utilisation of an engine: above it, queues grow fast with every delay
SIGMAS = 2.33  # standard deviations that 99 of 100 draws of a normal distribution stay below
MAX_FULL_SHARE = 0.98  # highest utilisation by full batches: random lengths leave an error of a hundredth
MIN_BATCH, MAX_BATCH = 8, 256  # in texts; a request may have several
TOKENS_STEP = 256
CACHE_OVERHEAD = 2  # factor for the response cache's overhead per answer: key, shape and allocation


def plan_encoder(capacity: Capacity, load: Load, needs: ModelNeeds) -> ModelPlan:
    """Return the instances, threads, batches, token budget, cache and shared memory that `load` needs."""
    cost = encoder_cost(needs.latency or {})
    cores, threads = capacity.cores, capacity.threads
    lines = [PlanLine("threads", f"{cores} cores / {capacity.instances} instances", str(threads))]
    settings: dict[str, object] = {"instances": capacity.instances, "threads": threads, "max_queue_delay_us": 0}
    speed = None if cost is None else _speed(capacity, load, needs, cost)
    if speed is not None:
        lines += speed.lines
        settings.update(speed.settings)
    request_bytes = capacity.serving.limits.request_bytes
    batch = capacity.max_batch_size if speed is None else speed.rows
    call = needs.call_bytes(capacity.serving.token_budget if speed is None else speed.token_budget)
    memory, size, shared = memory_lines(
        capacity.instances, needs.weights, batch, request_bytes, needs.answer_bytes, call=call
    )
    lines += memory
    cache, cache_lines = response_cache(load, needs)
    lines += cache_lines
    if cache:
        settings["serving.response_cache"] = True
    busy, lacking = (None, ()) if speed is None else (speed.cores, tuple(speed.lacking))
    return ModelPlan(capacity.name, tuple(lines), settings, size, shared, busy, cache, lacking, (needs.measured,))


def response_cache(load: Load, needs: ModelNeeds) -> tuple[int, list[PlanLine]]:
    """Return the bytes of the response cache for recurring texts; 0 if the load has none."""
    if load.distinct_texts is None:
        return 0, []
    cache = power_of_two(load.distinct_texts * load.texts * needs.answer_bytes * CACHE_OVERHEAD)
    formula = f"{load.distinct_texts} texts x {needs.answer_bytes} bytes x {CACHE_OVERHEAD}, to a power of two"
    return cache, [PlanLine("response cache", formula, f"{cache} bytes")]


@dataclass(frozen=True)
class Arrivals:
    """Load of one instance: texts per second, and milliseconds for the tokens of one text."""

    texts_s: float
    text_ms: float

    @property
    def share(self) -> float:
        """Share of the time that the instance is busy with texts, excluding the cost of calls."""
        return self.texts_s * self.text_ms / 1000


def _speed(capacity: Capacity, load: Load, needs: ModelNeeds, cost: CallCost) -> SpeedPlan:
    """Choose the largest batch and the cutting of batches, unless the texts overload the instances."""
    arrivals = Arrivals(load.requests_per_s * load.texts / capacity.instances, cost.part * load.tokens)
    lines, cores = _cost_lines(capacity, load, needs, cost, arrivals), arrivals.share * capacity.cores
    if arrivals.share > MAX_UTILISATION:
        holds = MAX_UTILISATION * capacity.instances * 1000 / arrivals.text_ms / load.texts
        faster = f", or {needs.faster}, which was the fastest that its build measured" if needs.faster else ""
        overload = (
            f"the texts alone keep it busy for more than {MAX_UTILISATION:.0%} of the time; it holds {number(holds)} "
            f"requests/s. What helps: about {math.ceil(cores / MAX_UTILISATION)} cores (machine: {{cores: ...}}), "
            f"shorter texts{faster}, or a lower precision"
        )
        return SpeedPlan(lines, {}, [overload], cores, capacity.max_batch_size, capacity.serving.token_budget)
    at_most, arriving = _batch_arrivals(load, cost, arrivals)
    max_batch = max(MAX_BATCH, power_of_two(load.texts))  # a request is not divided
    batch = min_batch = min(max_batch, max(MIN_BATCH, power_of_two(2 * at_most)))
    budget, step = _token_budget(capacity, load, needs, cost)
    call_cost, weighed = _call_cost(capacity, cost)
    requests = cost, arrivals.texts_s / load.texts, load.texts, load.tokens, load.longest or needs.length
    while (full := full_share(*requests, Batching(budget, batch, call_cost))) > MAX_FULL_SHARE and batch < max_batch:
        batch *= 2
    larger = f", and {batch // min_batch} times that, or requests pile up" * (batch > min_batch)
    chosen = PlanLine("max_batch_size", f"2 x {at_most} texts, to a power of two{larger}", str(batch))
    times = latencies(*requests, Batching(budget, batch, call_cost))
    p50, p99 = (float(np.quantile(times, share)) for share in (0.5, 0.99))
    texts = f"of the same; texts of {load.tokens} tokens on average, {load.longest or needs.length} at most"
    played = f"{len(times):,} requests at random times, played through"
    lines += [arriving, chosen, step, weighed]
    lines += [PlanLine("p50", played, f"{number(p50)} ms"), PlanLine("p99", texts, f"{number(p99)} ms")]
    settings = {"max_batch_size": batch, "serving.token_budget": budget, "serving.call_cost": call_cost}
    lacking = _lacking(load, needs, cost, full, max_batch, p99)
    return SpeedPlan(lines, settings, lacking, cores, batch, budget)


def _lacking(load: Load, needs: ModelNeeds, cost: CallCost, full: float, max_batch: int, p99: float) -> list[str]:
    """Return why the load cannot be held, and what helps. `full`: the share of the time that full batches take."""
    faster = f", or {needs.faster}" if needs.faster else ""
    if full > MAX_FULL_SHARE:
        return [
            f"requests pile up: with their padding, texts take {full:.0%} of the time in which they come, in batches "
            f"of at most {max_batch}. What helps: fewer requests a second, shorter texts, more cores{faster}"
        ]
    if load.p99_ms is None or p99 <= load.p99_ms:
        return []
    alone = cost.ms(load.texts * (load.longest or needs.length))  # of the longest request on an idle server
    helps = "fewer requests a second" if alone < load.p99_ms else "shorter texts"
    return [f"99 of 100 within {number(p99)} ms, not {number(load.p99_ms)} ms. What helps: {helps}, more cores{faster}"]


def _cost_lines(
    capacity: Capacity, load: Load, needs: ModelNeeds, cost: CallCost, arrivals: Arrivals
) -> list[PlanLine]:
    """Return the measured costs, the utilisation and, if tokens cost anything, the highest texts per second."""
    each, text_ms = arrivals.texts_s, arrivals.text_ms
    call, part = number(cost.call), number(1000 * cost.part)
    lines = [PlanLine("cost of a call", needs.measured, f"{call} ms + {part} ms a 1,000 tokens")]
    if text_ms:
        formula = f"{capacity.instances} x 1000 / ({load.tokens} tokens x {part} us)"
        lines.append(PlanLine("most texts/s", formula, number(capacity.instances * 1000 / text_ms)))
    formula = f"{number(each)} texts/s x {number(text_ms)} ms"
    return [*lines, PlanLine("busy with texts", formula, f"{arrivals.share:.0%} of each instance")]


def _batch_arrivals(load: Load, cost: CallCost, arrivals: Arrivals) -> tuple[int, PlanLine]:
    """Return the texts that arrive while a batch runs, 99th percentile; they come `load.texts` at a time."""
    each, text_ms = arrivals.texts_s, arrivals.text_ms
    forms = max(float(load.texts), each * cost.call / (1000 - each * text_ms))
    at_most = math.ceil(forms + SIGMAS * math.sqrt(forms * load.texts))
    formula = f"{number(each)} x {number(cost.call)} ms / (1000 - {number(each)} x {number(text_ms)})"
    result = f"{number(forms)} on average, {at_most} at most 99 times of 100"
    return at_most, PlanLine("texts that arrive during a batch", formula, result)


def _token_budget(capacity: Capacity, load: Load, needs: ModelNeeds, cost: CallCost) -> tuple[int, PlanLine]:
    """Return the largest token budget with which two calls fit into the p99; at least one text."""
    longest, configured = load.longest or needs.length, capacity.serving.token_budget
    if load.p99_ms is None or cost.part == 0:
        return configured, PlanLine("token_budget", "as asked: no p99_ms bounds a call", str(configured))
    tokens = (load.p99_ms / 2 - cost.call) / cost.part
    budget = max(longest, min(configured, int(tokens // TOKENS_STEP) * TOKENS_STEP))
    formula = (
        f"({number(load.p99_ms)} ms / 2 - {number(cost.call)} ms) / {number(1000 * cost.part)} us, at least one text "
        f"of {longest} tokens, at most {configured}"
    )
    return budget, PlanLine("token_budget", formula, str(budget))


def _call_cost(capacity: Capacity, cost: CallCost) -> tuple[int, PlanLine]:
    """Return the tokens of padding that cost as much as one more call, for the front's cut of a batch into calls."""
    if cost.part == 0:
        configured = capacity.serving.call_cost
        return configured, PlanLine("call_cost", "as asked: a token costs nothing that was measured", str(configured))
    tokens = round(cost.call / cost.part)
    return tokens, PlanLine("call_cost", f"{number(cost.call)} ms / {number(1000 * cost.part)} us a token", str(tokens))
