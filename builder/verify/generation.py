"""A decoder's graph against PyTorch: the same probabilities token by token, and the same greedy text.

What is run is what Triton will serve: the emitted engine over the graph. Knows tokens; knows no architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from builder.engines.decoding import Executors
from builder.errors import VerificationError
from builder.runtime.contract import CacheType, LayerShape
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.in_process import InPlace
from builder.verify.emitted import Taught, generate, perplexity, teacher_forced

TOLERANCE = 2e-3  # largest difference of a token's log-probability in fp32
TIE = 1e-3  # two logits this close may change places
LONGEST_SAMPLE = 96
NEW_TOKENS = 24
TOGETHER = 256  # tokens of rows that PyTorch reads at once, padding included: their logits are in memory
ROWS = 16  # that run at once: for weights that are read from memory more of them cost little


@dataclass(frozen=True)
class Reference:
    """What PyTorch says to the samples: at each position the best token, and the next token's log-probability.

    `generated`: what transformers' own `generate` says after the first of `prompts`.
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
class Agreement:
    """How well a graph agrees with a Reference."""

    error: float  # largest difference of a token's log-probability
    mean: float  # share of positions whose most probable token is PyTorch's
    worst: float  # of the samples
    perplexity: float
    alone: float  # share of greedy texts that are the same alone and among others
    greedy: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class WrongToken:
    """Of a written text the first token, by its `number`, that is not the best: the logit of `best` is `gap` higher."""

    number: int
    best: int
    gap: float


def make_reference(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Reference:
    """Run `model` over token rows, and let it write on from the first half of the first; the graph is to write on from
    more of them."""
    sampled = tuple(tuple(row[:LONGEST_SAMPLE]) for row in rows if len(row) > 2)
    answers = _best_and_logprobs(model, sampled)
    best, logprobs = ([answers[index][part] for index in range(len(sampled))] for part in (0, 1))
    prompts = tuple(row[: max(2, len(row) // (2 + index % 3))] for index, row in enumerate(sampled[:6]))
    return Reference(
        sampled, tuple(best), tuple(logprobs), prompts, tuple(greedy_tokens(model, prompts[0], NEW_TOKENS))
    )


def _best_and_logprobs(
    model: PreTrainedModel, rows: Sequence[Sequence[int]]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """At each position of each row the best next token, and the log-probability of the row's own."""
    answers = {}
    for index, logits in _logits(model, rows):
        own = torch.tensor(rows[index][1:])
        after = logits[: len(own)].float()
        chosen = torch.log_softmax(after, dim=-1).gather(-1, own[:, None])
        answers[index] = after.argmax(dim=-1).numpy(), chosen[:, 0].numpy()
    return answers


def _logits(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, torch.Tensor]]:
    """The index of each row, and the logits after each of its tokens, (tokens, vocabulary): the longest row first.

    Rows are padded on the right, which a decoder sees from no position before: several together take half the time.
    """
    remaining = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    while remaining:
        longest = len(rows[remaining[0]])
        count = max(1, TOGETHER // longest)
        group, remaining = remaining[:count], remaining[count:]
        padded = [[*rows[index], *[0] * (longest - len(rows[index]))] for index in group]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(padded), use_cache=False).logits
        yield from ((index, logits[row, : len(rows[index])]) for row, index in enumerate(group))


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
    caches: Sequence[LayerShape], slots: int, max_length: int, vocabulary: int, cache: CacheType = "float32"
) -> Geometry:
    return Geometry(slots, max_length, vocabulary, Geometry.pairs(caches), cache)


def largest_values(
    executors: Executors, caches: Sequence[LayerShape], vocabulary: int, reference: Reference
) -> dict[str, np.ndarray]:
    """The largest key and value of each channel, (heads, size), that the samples put into the cache of ONNX Runtime."""
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
    reference: Reference,
    cache: CacheType = "float32",
) -> Agreement:
    """Run a graph over the reference's rows, in batches of unequal rows, and on from its prompts."""
    longest = max(max(map(len, reference.rows)), max(len(p) + NEW_TOKENS for p in reference.prompts))
    geometry = geometry_of(caches, ROWS, longest + 1, vocabulary, cache)
    executor = executors(geometry)
    rows = zip(reference.rows, reference.best, strict=True)
    forced = teacher_forced(executor, [Taught(row[:-1], row[1:], best) for row, best in rows])
    forced.refuse_nan()
    together = generate(executor, reference.prompts, NEW_TOKENS)
    alone = [generate(executor, [prompt], NEW_TOKENS)[0] for prompt in reference.prompts]
    return Agreement(
        error=forced.error(reference.logprobs),
        mean=forced.share,
        worst=min(float(hit.mean()) for hit in forced.hits),
        perplexity=forced.perplexity,
        alone=float(np.mean([a == b for a, b in zip(alone, together, strict=True)])),
        greedy=tuple(map(tuple, together)),
    )


def refuse_wrong_probabilities(agreement: Agreement) -> None:
    """Raise VerificationError where a token's log-probability in fp32 is another than PyTorch's."""
    if not agreement.error <= TOLERANCE:
        raise VerificationError(
            f"the fused graph's log-probabilities are off by {agreement.error:.1e} of PyTorch's; at most "
            f"{TOLERANCE:.0e} is right. Nothing was published: this is a bug worth reporting, with the model's name"
        )


def refuse_wrong_text(model: PreTrainedModel, reference: Reference, agreement: Agreement) -> None:
    """Raise VerificationError where a greedy token of the graph is missing, or is not PyTorch's and the two no tie.

    A text is greedy where each of its tokens is the best after those before it, which one run over it says of all.
    That this is what `generate` does is found out on a text of its own.
    """
    texts = [(reference.prompts[0], reference.generated, "transformers' generate")]
    texts += [
        (prompt, text, "the fused graph") for prompt, text in zip(reference.prompts, agreement.greedy, strict=True)
    ]
    for _, text, writer in texts:
        _refuse_short(text, writer)
    written = list(dict.fromkeys((*prompt, *text) for prompt, text, _ in texts))  # the graph's first is generate's
    wrong = {written[index]: _wrong_token(written[index], logits) for index, logits in _logits(model, written)}
    for prompt, text, writer in texts:
        if problem := wrong[(*prompt, *text)]:
            raise VerificationError(
                f"greedy token {problem.number} of {writer} is {text[problem.number - 1]}, the best by transformers' "
                f"forward pass is {problem.best} (logits {problem.gap:.1e} apart). Nothing was published: this is a "
                "bug worth reporting, with the checkpoint's name"
            )


def _refuse_short(text: Sequence[int], writer: str) -> None:
    """Raise VerificationError where tokens are missing: no end token is known to whoever wrote `text`, so all that was
    asked for has to be there."""
    if len(text) != NEW_TOKENS:
        raise VerificationError(
            f"{writer} wrote {len(text)} tokens instead of {NEW_TOKENS}, although no end token came. Nothing was "
            "published: this is a bug worth reporting, with the checkpoint's name"
        )


def _wrong_token(tokens: Sequence[int], logits: torch.Tensor) -> WrongToken | None:
    """Of the last `NEW_TOKENS` of `tokens` the first that is neither the best after those before it, nor as good.

    `logits`: after each token, (tokens, vocabulary).
    """
    after, text = logits[-NEW_TOKENS - 1 : -1], torch.tensor(tokens[-NEW_TOKENS:])
    best, own = after.max(dim=-1), after.gather(-1, text[:, None])[:, 0]
    gaps, allowed = best.values - own, TIE * after.abs().amax(dim=-1).clamp(min=1.0)
    wrong = (~(gaps <= allowed)).nonzero()[:, 0].tolist()  # NaN is wrong too
    return WrongToken(wrong[0] + 1, int(best.indices[wrong[0]]), float(gaps[wrong[0]])) if wrong else None
