"""A decoder's graph against PyTorch: the same probabilities token by token, and the same greedy text.

What is run is what Triton will serve: the emitted engine over the graph. Knows tokens; knows no architecture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from builder.errors import VerificationError
from builder.export.decoder import CacheShape
from builder.onnx.graph import Graph
from builder.runtime.contract import Session
from builder.runtime.generation.beams import BeamSearch, Hypothesis
from builder.runtime.generation.engine import Engine
from builder.runtime.generation.executors.base import Executor, Geometry
from builder.runtime.generation.executors.in_process import InProcess
from builder.runtime.generation.options import Options
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.sampling import Sampler
from builder.runtime.generation.scheduler import Limits
from builder.runtime.generation.sequences import Beams, GeneratedSequence, Request
from builder.runtime.generation.text import StopStrings
from builder.speed import Latencies

TOLERANCE = 2e-3  # largest difference of a token's log-probability in fp32
TIE = 1e-3  # two logits this close may change places
LONGEST_SAMPLE = 96
NEW_TOKENS = 24
ROWS = 8
CONTEXT = 64
ENOUGH_S = 0.3  # of runs of one step


@dataclass(frozen=True)
class Reference:
    """What PyTorch says to the samples: at each position the best token, and the next token's log-probability."""

    rows: tuple[tuple[int, ...], ...]
    best: tuple[np.ndarray, ...]
    logprobs: tuple[np.ndarray, ...]
    prompts: tuple[tuple[int, ...], ...]
    greedy: tuple[tuple[int, ...], ...]

    @property
    def perplexity(self) -> float:
        return float(np.exp(-np.concatenate(self.logprobs).mean()))


@dataclass(frozen=True)
class Agreement:
    """How near a graph comes to a Reference."""

    error: float  # largest difference of a token's log-probability
    mean: float  # share of positions whose most probable token is PyTorch's
    worst: float  # of the samples
    perplexity: float
    alone: float  # share of greedy texts that are the same alone and among others
    greedy: tuple[tuple[int, ...], ...]


def make_reference(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Reference:
    """Run `model` over token rows, and greedily on from the first half of the first few."""
    kept = tuple(tuple(row[:LONGEST_SAMPLE]) for row in rows if len(row) > 2)
    best, logprobs = [], []
    with torch.no_grad():
        for row in kept:
            logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0].float()
            chosen = torch.log_softmax(logits[:-1], dim=-1).gather(-1, torch.tensor(row[1:])[:, None])
            best.append(logits[:-1].argmax(dim=-1).numpy())
            logprobs.append(chosen[:, 0].numpy())
    prompts = tuple(row[: max(2, len(row) // (2 + index % 3))] for index, row in enumerate(kept[:6]))
    greedy = tuple(tuple(greedy_tokens(model, prompt, NEW_TOKENS)) for prompt in prompts)
    return Reference(kept, tuple(best), tuple(logprobs), prompts, greedy)


def greedy_tokens(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """`model.generate` with nothing of the checkpoint's generation_config: no sampling, no end before `count`."""
    ids = torch.tensor([list(prompt)])
    before = model.generation_config
    try:
        model.generation_config = type(before)(max_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=0)
        with torch.no_grad():
            result = model.generate(ids, attention_mask=torch.ones_like(ids))
    finally:
        model.generation_config = before
    return [int(token) for token in result[0, len(prompt) :]]


def geometry_of(
    caches: Sequence[CacheShape], slots: int, max_length: int, vocabulary: int, cache: str = "float32"
) -> Geometry:
    return Geometry(slots, max_length, vocabulary, tuple((shape.heads, shape.size) for shape in caches), cache)


def largest_values(
    graph: Graph, caches: Sequence[CacheShape], vocabulary: int, reference: Reference, threads: int
) -> dict[str, np.ndarray]:
    """The largest key and value of each channel, (heads, size), that the samples put into the cache."""
    longest = max(map(len, reference.rows))
    executor = InProcess(graph.path, geometry_of(caches, 1, longest, vocabulary), Session(threads=threads))
    largest = {name: np.zeros((t.shape[1], t.shape[3]), np.float32) for name, t in executor.arena.items()}
    for row in reference.rows:
        executor.run(0, np.array([row], np.int64), np.zeros(1, np.int64))
        for name, tensor in executor.arena.items():
            seen = np.abs(tensor[0, :, : len(row)]).max(axis=1)
            largest[name] = np.maximum(largest[name], seen)
    return largest


def measure(
    graph: Graph,
    caches: Sequence[CacheShape],
    vocabulary: int,
    reference: Reference,
    threads: int,
    cache: str = "float32",
) -> Agreement:
    """Run the graph over the reference's rows, in batches of unequal rows, and on from its prompts."""
    longest = max(max(map(len, reference.rows)), max(len(p) + NEW_TOKENS for p in reference.prompts))
    geometry = geometry_of(caches, ROWS, longest + 1, vocabulary, cache)
    executor = InProcess(graph.path, geometry, Session(threads=threads))
    hits, logprobs = _teacher_forced(executor, reference.rows, reference.best)
    errors = [np.abs(a - b).max() for a, b in zip(reference.logprobs, logprobs, strict=True)]
    shares = [float(hit.mean()) for hit in hits]
    together = generate(executor, reference.prompts, NEW_TOKENS)
    alone = [generate(executor, [prompt], NEW_TOKENS)[0] for prompt in reference.prompts]
    if not all(np.isfinite(values).all() for values in logprobs):
        raise VerificationError("the graph gives NaN on the samples. Nothing was published: check the weights")
    return Agreement(
        error=float(max(errors)),
        mean=float(np.concatenate(hits).mean()),
        worst=min(shares),
        perplexity=float(np.exp(-np.concatenate(logprobs).mean())),
        alone=float(np.mean([a == b for a, b in zip(alone, together, strict=True)])),
        greedy=tuple(map(tuple, together)),
    )


def _teacher_forced(
    executor: Executor, rows: Sequence[Sequence[int]], best: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Feed each row token by token, as decoding does: where the best token is `best`, and log-probabilities."""
    hits = [np.zeros(len(row) - 1) for row in rows]
    logprobs = [np.zeros(len(row) - 1) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    for start in range(0, len(order), executor.geometry.slots):
        group = order[start : start + executor.geometry.slots]
        for position in range(len(rows[group[0]]) - 1):
            running = [index for index in group if position < len(rows[index]) - 1]
            tokens = np.array([[rows[index][position]] for index in running], np.int64)
            logits = executor.run(0, tokens, np.full(len(running), position, np.int64)).astype(np.float64)
            shifted = logits - logits.max(axis=-1, keepdims=True)
            totals = np.log(np.exp(shifted).sum(axis=-1))
            for place, index in enumerate(running):
                hits[index][position] = logits[place].argmax() == best[index][position]
                logprobs[index][position] = shifted[place, rows[index][position + 1]] - totals[place]
    return hits, logprobs


class _NoText:
    """Stands in for a detokeniser where only tokens are wanted."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Asked:
    """One request of the emitted engine: a prompt, the rules of its answer, and the text its encoder reads."""

    prompt: tuple[int, ...]
    rules: Rules
    source: tuple[int, ...] = ()


def generate(executor: Executor, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens after each prompt, all of them together in the emitted engine, joining and leaving as they may."""
    rules = Rules(Options(temperature=0.0), max_tokens=count)
    return [list(found[0].tokens) for found in answer(executor, [Asked(tuple(prompt), rules) for prompt in prompts])]


def answer(executor: Executor, asked: Sequence[Asked]) -> list[list[Hypothesis]]:
    """What the emitted engine says to each, all together: the n best of a search, or one sequence with no score."""
    engine = Engine(executor, Limits(queue=len(asked), prefill_tokens=16), reuse_prefixes=False)
    running: list[GeneratedSequence | Beams] = []
    errors: list[Exception] = []
    text: Any = _NoText()
    for index, one in enumerate(asked):
        rules = one.rules
        request = Request(
            list(one.prompt), rules.options, rules.max_tokens, lambda piece: None, errors.append, source=one.source
        )
        ends = frozenset(rules.ends)
        if rules.options.num_beams > 1:
            running.append(Beams(request, BeamSearch(rules, one.prompt, ends), lambda: text))
        else:
            sampler = Sampler(rules, index, one.prompt)
            running.append(GeneratedSequence(request, sampler, text, StopStrings(()), ends))
        engine.submit(running[-1:])
    engine.run_until_idle()
    if errors:
        raise VerificationError(f"the emitted engine failed on the samples: {errors[0]!r}")
    return [
        sequence.search.ended[: sequence.request.options.n]
        if isinstance(sequence, Beams)
        else [Hypothesis(tuple(sequence.sampler.generated), 0.0, "")]
        for sequence in running
    ]


def refuse_wrong_text(model: PreTrainedModel, reference: Reference, agreement: Agreement) -> None:
    """Raise VerificationError where a greedy token differs from PyTorch's and the two were no tie."""
    if agreement.error > TOLERANCE:
        raise VerificationError(
            f"the fused graph's log-probabilities are off by {agreement.error:.1e} of PyTorch's; at most "
            f"{TOLERANCE:.0e} is right. Nothing was published: this is a bug worth reporting, with the model's name"
        )
    for prompt, expected, actual in zip(reference.prompts, reference.greedy, agreement.greedy, strict=True):
        different = [i for i, (a, b) in enumerate(zip(expected, actual, strict=True)) if a != b]
        if not different:
            continue
        place = different[0]
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *expected[:place]]])
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        gap = float(logits[expected[place]] - logits[actual[place]])
        if gap > TIE * max(1.0, float(logits.abs().max())):
            raise VerificationError(
                f"greedy token {place + 1} is {actual[place]}, transformers' is {expected[place]} (logits {gap:.1e} "
                "apart). Nothing was published: this is a bug worth reporting, with the checkpoint's name"
            )


def pytorch_step_latencies(model: PreTrainedModel, threads: int) -> Latencies:
    """A token of 1 and of 8 rows after `CONTEXT` tokens, and a prompt of 128, as transformers runs them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            times = {}
            for rows in (1, ROWS):
                ids = torch.ones((rows, CONTEXT), dtype=torch.long)
                past = model(input_ids=ids, use_cache=True).past_key_values
                step = torch.ones((rows, 1), dtype=torch.long)

                def run(step: torch.Tensor = step, past: Any = past) -> None:
                    model(input_ids=step, past_key_values=past, use_cache=True)

                times[f"token, {rows} rows"] = median_ms(run)
            prompt = torch.ones((1, 2 * CONTEXT), dtype=torch.long)
            times["prompt of 128"] = median_ms(lambda: model(input_ids=prompt, use_cache=True, logits_to_keep=1))
            return times
    finally:
        torch.set_num_threads(before)


def step_latencies(
    graph: Graph, caches: Sequence[CacheShape], vocabulary: int, threads: int, cache: str = "float32"
) -> Latencies:
    """The same steps on the graph, in the emitted executor."""
    geometry = geometry_of(caches, ROWS, 4 * CONTEXT, vocabulary, cache)
    executor = InProcess(graph.path, geometry, Session(threads=threads))
    times = {}
    for rows in (1, ROWS):
        tokens, lengths = np.ones((rows, 1), np.int64), np.full(rows, CONTEXT)

        def run(tokens: np.ndarray = tokens, lengths: np.ndarray = lengths) -> None:
            executor.run(0, tokens, lengths)

        times[f"token, {rows} rows"] = median_ms(run)
    prompt, nothing = np.ones((1, 2 * CONTEXT), np.int64), np.zeros(1, np.int64)
    times["prompt of 128"] = median_ms(lambda: executor.run(0, prompt, nothing))
    return times


def median_ms(run: Callable[[], object]) -> float:
    """Median of 3 to 20 runs after two to warm up, in milliseconds; `ENOUGH_S` of them if they are short."""
    run()
    run()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 20 and sum(times) < ENOUGH_S):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1000
