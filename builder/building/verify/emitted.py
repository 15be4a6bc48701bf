"""The emitted engine over a graph, run in this process: its generated tokens, and its scores of tokens it is fed.

The build runs the code that Triton will serve. Knows tokens; knows no architecture and nothing of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from builder.common.errors import VerificationError
from builder.runtime.generation.beams import BeamSearch, Hypothesis
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors.base import Executor
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.sampling import Sampler
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.sequences import BeamSequence, GeneratedSequence, Request
from builder.runtime.generation.text import StopStrings

PREFILL_TOKENS = 16  # few, so that short prompts come in pieces too


@dataclass(frozen=True)
class ForcedRow:
    """Sequence that is fed token by token, whatever the model would generate: `targets[i]` follows `tokens[i]`.

    `best[i]` is the token that PyTorch finds most probable there.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    best: np.ndarray


@dataclass(frozen=True)
class ForcedResult:
    """Result of teacher forcing: by row, where the best token is PyTorch's, and the targets' log-probabilities."""

    hits: list[np.ndarray]
    logprobs: list[np.ndarray]

    def refuse_nan(self) -> None:
        """Raise VerificationError if a log-probability is not a finite number."""
        if not all(np.isfinite(values).all() for values in self.logprobs):
            raise VerificationError(
                "the graph gives NaN on the samples. Nothing was published: check the weights and, where its results "
                "are in fp16, which ends at 65504, choose a --precision of wider range that its engine has"
            )

    def error(self, reference: Sequence[np.ndarray]) -> float:
        """Return the largest difference of a log-probability."""
        return float(max(np.abs(a - b).max() for a, b in zip(reference, self.logprobs, strict=True)))

    @property
    def share(self) -> float:
        """Share of the positions whose most probable token is PyTorch's."""
        return float(np.concatenate(self.hits).mean())

    @property
    def perplexity(self) -> float:
        return perplexity(self.logprobs)


def perplexity(logprobs: Sequence[np.ndarray]) -> float:
    """Return exp of the mean negative log-probability, over all rows."""
    return float(np.exp(-np.concatenate(logprobs).mean()))


@dataclass(frozen=True)
class _FedRow:
    """Row that is being fed: the results after each of its tokens that have run."""

    row: ForcedRow
    hits: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        return len(self.hits)

    @property
    def remaining(self) -> int:
        return len(self.row.targets) - self.done

    def record(self, logits: np.ndarray) -> None:
        """Add the results of `logits`: after each of the next tokens, (tokens, vocabulary)."""
        for after in logits:
            place, shifted = self.done, after - after.max()
            self.hits.append(bool(after.argmax() == self.row.best[place]))
            total = np.log(np.exp(shifted).sum(dtype=np.float64))
            self.logprobs.append(float(shifted[self.row.targets[place]] - total))


def teacher_forced(
    executor: Executor,
    rows: Sequence[ForcedRow],
    begin: Callable[[Sequence[int]], object] = lambda group: None,
    steps: int | None = None,
) -> ForcedResult:
    """Feed each row token by token, as decoding does, in batches of unequal rows.

    `begin`: called with the indices of each batch, to attach what their encoder read.
    `steps`: how many of a row's last tokens come one by one, those before them in one call, as a prompt does: the rows
    of a step then hold unequal numbers of tokens. None: all of them.
    """
    fed = [_FedRow(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: -fed[index].remaining)
    for start in range(0, len(order), executor.geometry.slots):
        group = order[start : start + executor.geometry.slots]
        begin(group)
        _feed(executor, [fed[index] for index in group], steps)
    return ForcedResult([np.array(one.hits) for one in fed], [np.array(one.logprobs) for one in fed])


def _feed(executor: Executor, group: Sequence[_FedRow], steps: int | None) -> None:
    """Run `group`, the longest first: so the rows that have tokens left are always those of the first slots."""
    for slot, one in enumerate(group):
        if steps is not None and (prompt := one.remaining - steps) > 0:
            tokens = np.array([one.row.tokens[:prompt]], np.int64)
            one.record(executor.run(slot, tokens, np.zeros(1, np.int64), np.arange(prompt)))
    while running := [one for one in group if one.remaining]:
        tokens = np.array([[one.row.tokens[one.done]] for one in running], np.int64)
        logits = executor.run(0, tokens, np.array([one.done for one in running]))
        for one, after in zip(running, logits, strict=True):
            one.record(after[None])


class _NoDetokeniser:
    """Stand-in for a detokeniser where only tokens are needed."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class PromptedRequest:
    """One request of the emitted engine: a prompt, the rules of its answer, and the text its encoder reads."""

    prompt: tuple[int, ...]
    rules: Rules
    source: tuple[int, ...] = ()


def generate(
    executor: Executor, prompts: Sequence[Sequence[int]], count: int, prefill_tokens: int = PREFILL_TOKENS
) -> list[list[int]]:
    """Return greedy tokens after each prompt, all of them together in the emitted engine, in any order of batches."""
    rules = Rules(RequestOptions(temperature=0.0), max_tokens=count)
    prompted = [PromptedRequest(tuple(prompt), rules) for prompt in prompts]
    return [list(hypotheses[0].tokens) for hypotheses in answer(executor, prompted, prefill_tokens)]


def answer(
    executor: Executor, prompted: Sequence[PromptedRequest], prefill_tokens: int = PREFILL_TOKENS
) -> list[list[Hypothesis]]:
    """Return the emitted engine's answers to all: the n best of a search, or one sequence with no score."""
    loop = DecodeLoop(
        executor, SchedulerLimits(queue=len(prompted), prefill_tokens=prefill_tokens), reuse_prefixes=False
    )
    running: list[GeneratedSequence | BeamSequence] = []
    errors: list[Exception] = []
    text: Any = _NoDetokeniser()
    for index, one in enumerate(prompted):
        rules = one.rules
        request = Request(
            list(one.prompt), rules.options, rules.max_tokens, lambda piece: None, errors.append, source=one.source
        )
        ends = frozenset(rules.ends)
        if rules.options.num_beams > 1:
            running.append(BeamSequence(request, BeamSearch(rules, one.prompt, ends), lambda: text))
        else:
            sampler = Sampler(rules, index, one.prompt)
            running.append(GeneratedSequence(request, sampler, text, StopStrings(()), ends))
        loop.submit(running[-1:])
    loop.run_until_idle()
    if errors:
        raise VerificationError(f"the emitted engine failed on the samples: {errors[0]!r}")
    return [
        sequence.search.ended[: sequence.request.options.n]
        if isinstance(sequence, BeamSequence)
        else [Hypothesis(tuple(sequence.sampler.generated), 0.0, "")]
        for sequence in running
    ]
