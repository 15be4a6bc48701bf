"""The emitted engine over a graph, run in this process: what it generates, and what it thinks of tokens it is fed.

What is run is what Triton will serve. Knows tokens; knows no architecture and nothing of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from builder.errors import VerificationError
from builder.runtime.generation.beams import BeamSearch, Hypothesis
from builder.runtime.generation.engine import Engine
from builder.runtime.generation.executors.base import Executor
from builder.runtime.generation.options import Options
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.sampling import Sampler
from builder.runtime.generation.scheduler import Limits
from builder.runtime.generation.sequences import Beams, GeneratedSequence, Request
from builder.runtime.generation.text import StopStrings

PREFILL_TOKENS = 16  # few, so that short prompts come in pieces too


@dataclass(frozen=True)
class Taught:
    """A sequence that is fed token by token, whatever the model would say: `tokens[i]` is followed by `targets[i]`.

    `best[i]` is the token that PyTorch finds most probable there.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    best: np.ndarray


@dataclass(frozen=True)
class Agreeing:
    """What came of teacher forcing: by row, where the best token is PyTorch's, and the targets' log-probabilities."""

    hits: list[np.ndarray]
    logprobs: list[np.ndarray]

    def refuse_nan(self) -> None:
        """Raises VerificationError where a log-probability is not a finite number."""
        if not all(np.isfinite(values).all() for values in self.logprobs):
            raise VerificationError(
                "the graph gives NaN on the samples. Nothing was published: check the weights and, where its results "
                "are in fp16, which ends at 65504, choose a --precision of wider range that its engine has"
            )

    def error(self, reference: Sequence[np.ndarray]) -> float:
        """The largest difference of a log-probability."""
        return float(max(np.abs(a - b).max() for a, b in zip(reference, self.logprobs, strict=True)))

    @property
    def share(self) -> float:
        """Of the positions, those whose most probable token is PyTorch's."""
        return float(np.concatenate(self.hits).mean())

    @property
    def perplexity(self) -> float:
        return perplexity(self.logprobs)


def perplexity(logprobs: Sequence[np.ndarray]) -> float:
    """exp of the mean negative log-probability, over all rows."""
    return float(np.exp(-np.concatenate(logprobs).mean()))


def teacher_forced(
    executor: Executor, rows: Sequence[Taught], begin: Callable[[Sequence[int]], object] = lambda group: None
) -> Agreeing:
    """Feed each row token by token, as decoding does, in batches of unequal rows.

    `begin`: called with the indices of each batch, to attach what their encoder read.
    """
    hits = [np.zeros(len(row.targets)) for row in rows]
    logprobs = [np.zeros(len(row.targets)) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].targets))
    for start in range(0, len(order), executor.geometry.slots):
        group = order[start : start + executor.geometry.slots]
        begin(group)
        for position in range(len(hits[group[0]])):
            running = [index for index in group if position < len(hits[index])]
            tokens = np.array([[rows[index].tokens[position]] for index in running], np.int64)
            logits = executor.run(0, tokens, np.full(len(running), position, np.int64))
            shifted = logits - logits.max(axis=-1, keepdims=True)
            totals = np.log(np.exp(shifted).sum(axis=-1, dtype=np.float64))
            best = logits.argmax(axis=-1)
            for row, index in enumerate(running):
                hits[index][position] = best[row] == rows[index].best[position]
                logprobs[index][position] = shifted[row, rows[index].targets[position]] - totals[row]
    return Agreeing(hits, logprobs)


class _NoText:
    """Stands in for a detokeniser where only tokens are wanted."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Prompted:
    """One request of the emitted engine: a prompt, the rules of its answer, and the text its encoder reads."""

    prompt: tuple[int, ...]
    rules: Rules
    source: tuple[int, ...] = ()


def generate(
    executor: Executor, prompts: Sequence[Sequence[int]], count: int, prefill_tokens: int = PREFILL_TOKENS
) -> list[list[int]]:
    """Greedy tokens after each prompt, all of them together in the emitted engine, joining and leaving as they may."""
    rules = Rules(Options(temperature=0.0), max_tokens=count)
    prompted = [Prompted(tuple(prompt), rules) for prompt in prompts]
    return [list(hypotheses[0].tokens) for hypotheses in answer(executor, prompted, prefill_tokens)]


def answer(
    executor: Executor, prompted: Sequence[Prompted], prefill_tokens: int = PREFILL_TOKENS
) -> list[list[Hypothesis]]:
    """What the emitted engine says to each, all together: the n best of a search, or one sequence with no score."""
    engine = Engine(executor, Limits(queue=len(prompted), prefill_tokens=prefill_tokens), reuse_prefixes=False)
    running: list[GeneratedSequence | Beams] = []
    errors: list[Exception] = []
    text: Any = _NoText()
    for index, one in enumerate(prompted):
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
