"""A decoder's graph against PyTorch: the same probabilities token by token, and the same greedy text.

The build runs what Triton will serve: the emitted engine over the graph. Knows tokens; knows no architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from builder.building.verify.emitted import ForcedRow, generate, perplexity, teacher_forced
from builder.common.errors import VerificationError
from builder.engines.decoding import Executors
from builder.graphs.export.positions import first_position
from builder.runtime.contract import CacheType, LayerShape
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.onnxruntime import InPlace

TOLERANCE = 2e-3  # largest difference of a token's log-probability in fp32
MAX_TIE_GAP = 1e-3  # two logits this close may change places
MAX_SAMPLE_TOKENS = 96
NEW_TOKENS = 24
GENERATED_TOKENS = 4  # by transformers' own generate, one by one: a difference from a run over a text shows at once
MAX_BATCH_TOKENS = 256  # tokens of rows that PyTorch reads at once, padding included: their logits are in memory
MIN_LENGTH_SHARE = 0.75  # least length of a row, as a share of the longest one: padding is computed, too
ROWS = 16  # rows that run at once: weights are read from memory once for all of them


@dataclass(frozen=True)
class DecoderReference:
    """PyTorch's answers to the samples: at each position the best token, and the next token's log-probability.

    `generated`: the answer of transformers' own `generate` after the first of `prompts`.
    """

    rows: tuple[tuple[int, ...], ...]
    best: tuple[np.ndarray, ...]
    logprobs: tuple[np.ndarray, ...]
    prompts: tuple[tuple[int, ...], ...]
    generated: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        return perplexity(self.logprobs)


@dataclass(frozen=True)
class RunOrder:
    """Order in which a graph runs over the samples, `rows` at once.

    `steps`: the last tokens of a row that come one by one, after one call with those before them, as a prompt has it
    (None: all of them). `alone`: the number of prompts that are also continued alone (None: all).
    """

    rows: int
    steps: int | None
    alone: int | None


TOKEN_BY_TOKEN = RunOrder(ROWS, None, None)
# A graph in fp32 is compared with PyTorch at every position. A row that sees another row, or a step that reads the
# cache differently from a prompt, is wrong in each of these steps, whose rows have unequal lengths; an error of a row
# alone shows in its text. A graph in lower precision is measured as it generates: token by token.
EXACT = RunOrder(rows=40, steps=12, alone=1)
# Over an int8 cache, calls of many tokens compute attention in another way (builder/engines/optimise/
# prompt_attention.py): most tokens of the longer rows are one call.
INT8_CACHE = RunOrder(ROWS, EXACT.steps, None)


@dataclass(frozen=True)
class DecoderAgreement:
    """Agreement of a graph with PyTorch's answers. `alone`: the greedy texts after the first prompts, one at a time."""

    error: float  # largest difference of a token's log-probability
    mean: float  # share of positions whose most probable token is PyTorch's
    worst: float  # of the samples
    perplexity: float
    greedy: tuple[tuple[int, ...], ...]
    alone: tuple[tuple[int, ...], ...]

    @property
    def same_alone(self) -> float:
        """Share of greedy texts that are the same alone and among others."""
        return float(np.mean([a == b for a, b in zip(self.alone, self.greedy, strict=False)]))


@dataclass(frozen=True)
class GreedyText:
    """Greedy `text` of a `writer` after `prompt`, of which `asked` tokens were requested."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    asked: int
    writer: str

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.text)

    def is_start_of(self, row: tuple[int, ...]) -> bool:
        return row[: len(self.tokens)] == self.tokens

    def refuse_short(self) -> None:
        """Raise VerificationError if tokens are missing: the writer has no end token, so it must write all of them."""
        if len(self.text) != self.asked:
            raise VerificationError(
                f"{self.writer} wrote {len(self.text)} tokens instead of {self.asked}, although no end token came. "
                "Nothing was published: this is a bug worth reporting, with the checkpoint's name"
            )

    def refuse_wrong(self, logits: torch.Tensor) -> None:
        """Raise VerificationError for a token that is neither the best after those before it nor tied with the best.

        `logits`: PyTorch's after each of the `tokens`, (tokens, vocabulary).
        """
        after, text = logits[-self.asked - 1 : -1], torch.tensor(self.text)
        best, own = after.max(dim=-1), after.gather(-1, text[:, None])[:, 0]
        gaps, allowed = best.values - own, MAX_TIE_GAP * after.abs().amax(dim=-1).clamp(min=1.0)
        wrong = (~(gaps <= allowed)).nonzero()[:, 0].tolist()  # NaN is wrong too
        if wrong:
            number = wrong[0]
            raise VerificationError(
                f"greedy token {number + 1} of {self.writer} is {self.text[number]}, the best by transformers' "
                f"forward pass is {int(best.indices[number])} (logits {float(gaps[number]):.1e} apart). Nothing was "
                "published: this is a bug worth reporting, with the checkpoint's name"
            )


def make_reference(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> DecoderReference:
    """Run `model` over token rows, and let it continue the first of `prompts`, the beginnings of some of them."""
    sampled = tuple(tuple(row[:MAX_SAMPLE_TOKENS]) for row in rows if len(row) > 2)
    answers = _best_and_logprobs(model, sampled)
    best, logprobs = ([answers[index][part] for index in range(len(sampled))] for part in (0, 1))
    prompts = tuple(row[: max(2, len(row) // (2 + index % 3))] for index, row in enumerate(sampled[:6]))
    return DecoderReference(
        sampled, tuple(best), tuple(logprobs), prompts, tuple(greedy_tokens(model, prompts[0], GENERATED_TOKENS))
    )


def _best_and_logprobs(
    model: PreTrainedModel, rows: Sequence[Sequence[int]]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return the best next token at each position of each row, and the log-probability of the row's own."""
    answers = {}
    for index, logits in _logits(model, rows):
        own = torch.tensor(rows[index][1:])
        after = logits[: len(own)].float()
        chosen = torch.log_softmax(after, dim=-1).gather(-1, own[:, None])
        answers[index] = after.argmax(dim=-1).numpy(), chosen[:, 0].numpy()
    return answers


def _logits(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of each row, and the logits after each of its tokens, (tokens, vocabulary): longest row first.

    Rows are padded on the right, which a decoder sees from no position before: several together take half the time.
    """
    remaining = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    while remaining:
        longest = len(rows[remaining[0]])
        similar = [index for index in remaining if len(rows[index]) >= MIN_LENGTH_SHARE * longest]
        group = similar[: max(1, MAX_BATCH_TOKENS // longest)]
        remaining = remaining[len(group) :]
        padded = [[*rows[index], *[0] * (longest - len(rows[index]))] for index in group]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(padded), use_cache=False).logits
        yield from ((index, logits[row, : len(rows[index])]) for row, index in enumerate(group))


def greedy_tokens(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Run `model.generate` with nothing of the checkpoint's generation_config: no sampling, no end before `count`."""
    result = generate_with(model, prompt, max_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=0)
    return [int(token) for token in result[0, len(prompt) :]]


def generate_with(model: PreTrainedModel, tokens: Sequence[int], **settings: Any) -> torch.Tensor:
    """Run `model.generate` on one row with `settings` in place of its generation_config.

    Its positions are those that the model counts by itself.
    """
    ids, before = torch.tensor([list(tokens)]), model.generation_config
    first = first_position(model)
    explicit = {"position_ids": first + torch.arange(ids.shape[1])[None]} if first else {}
    try:
        model.generation_config = type(before)(**settings)
        with torch.no_grad():
            result: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **explicit)
    finally:
        model.generation_config = before
    return result


def geometry_of(
    caches: Sequence[LayerShape], slots: int, max_length: int, vocabulary: int, cache: CacheType = "float32"
) -> Geometry:
    return Geometry(slots, max_length, vocabulary, Geometry.pairs(caches), cache, None, Geometry.states_of(caches))


def largest_values(
    executors: Executors, caches: Sequence[LayerShape], vocabulary: int, reference: DecoderReference
) -> dict[str, np.ndarray]:
    """Return the largest key and value of each channel, (heads, size), in ONNX Runtime's cache on the samples."""
    longest = max(map(len, reference.rows))
    executor = executors(geometry_of(caches, 1, longest, vocabulary))
    assert isinstance(executor, InPlace)
    largest = {name: np.zeros((t.shape[1], t.shape[3]), np.float32) for name, t in executor.arena.items()}
    for row in reference.rows:
        executor.run(0, np.array([row], np.int64), np.zeros(1, np.int64))
        for name, tensor in executor.arena.items():
            seen = np.abs(tensor[0, :, : len(row)]).max(axis=1)
            largest[name] = np.maximum(largest[name], seen)
    return largest


def measure(
    executors: Executors,
    caches: Sequence[LayerShape],
    vocabulary: int,
    reference: DecoderReference,
    cache: CacheType = "float32",
    order: RunOrder = TOKEN_BY_TOKEN,
) -> DecoderAgreement:
    """Run a graph over the reference's rows, in batches of unequal rows, and on from its prompts."""
    longest = max(max(map(len, reference.rows)), max(len(p) + NEW_TOKENS for p in reference.prompts))
    slots = min(order.rows, len(reference.rows))
    geometry = geometry_of(caches, slots, longest + 1, vocabulary, cache)
    executor = executors(geometry)
    rows = zip(reference.rows, reference.best, strict=True)
    forced = teacher_forced(executor, [ForcedRow(row[:-1], row[1:], best) for row, best in rows], steps=order.steps)
    forced.refuse_nan()
    together = generate(executor, reference.prompts, NEW_TOKENS)
    alone = [generate(executor, [prompt], NEW_TOKENS)[0] for prompt in reference.prompts[: order.alone]]
    return DecoderAgreement(
        error=forced.error(reference.logprobs),
        mean=forced.share,
        worst=min(float(hit.mean()) for hit in forced.hits),
        perplexity=forced.perplexity,
        greedy=tuple(map(tuple, together)),
        alone=tuple(map(tuple, alone)),
    )


def refuse_wrong_probabilities(error: float) -> None:
    """Raise VerificationError if the largest `error` of a token's log-probability in fp32 is too large."""
    if not error <= TOLERANCE:  # NaN is wrong too
        raise VerificationError(
            f"the fused graph's log-probabilities are off by {error:.1e} of PyTorch's; at most "
            f"{TOLERANCE:.0e} is right. Nothing was published: this is a bug worth reporting, with the model's name"
        )


def refuse_wrong_text(model: PreTrainedModel, reference: DecoderReference, agreement: DecoderAgreement) -> None:
    """Raise VerificationError if a greedy token of the graph is missing, or differs from PyTorch's without a tie.

    A text is greedy where each of its tokens is the best after those before it, which one run over it shows for all.
    A separate text checks that `generate` writes such texts.
    """
    prompts, alone = reference.prompts, agreement.alone
    texts = [
        GreedyText(prompts[0], reference.generated, GENERATED_TOKENS, "transformers' generate"),
        *(GreedyText(*text, NEW_TOKENS, "the fused graph") for text in zip(prompts, agreement.greedy, strict=True)),
        *(GreedyText(*text, NEW_TOKENS, "the fused graph alone") for text in zip(prompts, alone, strict=False)),
    ]
    for text in texts:
        text.refuse_short()
    rows = _longest(text.tokens for text in texts)
    for index, logits in _logits(model, rows):
        for text in texts:
            if text.is_start_of(rows[index]):
                text.refuse_wrong(logits[: len(text.tokens)])


def _longest(rows: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return `rows` without those that are the beginning of another, as a text alone mostly is of one in a batch."""
    longest: list[tuple[int, ...]] = []
    for row in sorted(dict.fromkeys(rows), key=len, reverse=True):
        if not any(other[: len(row)] == row for other in longest):
            longest.append(row)
    return longest
