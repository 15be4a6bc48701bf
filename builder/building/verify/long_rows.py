"""A decoder's graph far beyond the samples: one long row, past every window in its configuration.

PyTorch runs the row in one forward pass, the graph in pieces as prompts are served, and token by token where a window
begins to hide the first key. The row is random, so that no key stands for another. Knows tokens; knows no architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from builder.building.verify.generation import TOLERANCE
from builder.common.errors import VerificationError
from builder.runtime.generation.executors.base import Executor

# A forward pass of PyTorch over 8,192 tokens of half a billion parameters takes about a minute on two cores, less than
# the export of such a model. A longer window is compared at its edges when the mask is read, and not run.
MAX_ROW_TOKENS = 8192
MIN_ROW_TOKENS = 512  # also without a window: the samples are shorter
PIECE = 256  # tokens of a prompt in one call
STEPS = 4  # tokens one by one on either side of a window's edge
BEST = 8  # of PyTorch's tokens, whose log-probabilities are compared


@dataclass(frozen=True)
class LongRow:
    """Row of `tokens`; `cuts`: how many of them have run after each call of the graph.

    `windows`: those in the configuration.
    """

    tokens: tuple[int, ...]
    cuts: tuple[int, ...]
    windows: tuple[int, ...]

    @property
    def compared(self) -> tuple[tuple[int, ...], ...]:
        """Token counts of each call after which the graph is compared with PyTorch: in its middle, and at its end."""
        return tuple(
            tuple(sorted({past + (cut - past + 1) // 2, cut}))
            for past, cut in zip((0, *self.cuts), self.cuts, strict=False)
        )


@dataclass(frozen=True)
class LongAnswers:
    """PyTorch's answers to `row`, after each of the tokens that are compared.

    Its best tokens, (compared, BEST) int64, and their log-probabilities, float64.
    """

    row: LongRow
    best: np.ndarray
    logprobs: np.ndarray


def windows(config: Any) -> tuple[int, ...]:
    """Return every number of tokens that a configuration gives as a window or chunk, whether a layer uses it or not."""
    named = config.get_text_config().to_dict().items()
    return tuple(sorted({int(v) for k, v in named if ("window" in k or "chunk" in k) and type(v) is int and v > 0}))


def long_row(config: Any, vocabulary: int, max_length: int) -> LongRow:
    """Return a row past the longest window that `MAX_ROW_TOKENS` allows, of no more than `max_length` tokens."""
    reached = [window for window in windows(config) if window + STEPS < MAX_ROW_TOKENS]
    end = min(max_length, MAX_ROW_TOKENS, max([MIN_ROW_TOKENS, *(window + PIECE for window in reached)]))
    steps = {window + step for window in reached for step in range(-STEPS, STEPS + 1)}
    cuts = sorted(cut for cut in {*range(PIECE, end, PIECE), *steps, end} if 0 < cut <= end)
    tokens = np.random.default_rng(0).integers(0, vocabulary, end)
    return LongRow(tuple(tokens.tolist()), tuple(cuts), windows(config))


def unreached(config: Any, max_length: int) -> tuple[str, ...]:
    """Return a warning if a served row may be longer than a window that the build's rows do not exceed."""
    beyond = [window for window in windows(config) if window + STEPS >= MAX_ROW_TOKENS and window < max_length]
    return tuple(
        f"no row of the build went past the window of {window} tokens: it ends at {MAX_ROW_TOKENS}" for window in beyond
    )


def ask_long_row(model: PreTrainedModel, max_length: int) -> LongAnswers:
    """Run `model` over a long row, of no more than `max_length` tokens."""
    row = long_row(model.config, int(model.get_input_embeddings().weight.shape[0]), max_length)
    logits = pytorch_logits(model, row)
    best = torch.log_softmax(logits, dim=-1).topk(min(BEST, logits.shape[-1]), dim=-1)
    return LongAnswers(row, best.indices.numpy(), best.values.numpy())


def refuse_wrong_long_row(answers: LongAnswers, executor: Executor) -> float:
    """Return the largest error on a long row.

    Raises VerificationError for one too large, with the place and the windows. `executor`: of the graph, with a slot
    for the whole row.
    """
    row, errors = answers.row, long_row_errors(executor, answers)
    worst = int(errors.argmax())
    if not errors[worst] <= TOLERANCE:  # NaN is wrong too
        first = sum(row.compared, ())[int(np.argmax(~(errors <= TOLERANCE)))]
        raise VerificationError(
            f"after {first} tokens of a row the fused graph's log-probabilities differ from PyTorch's (by up to "
            f"{errors[worst]:.1e}; at most {TOLERANCE:.0e} is right); windows in its configuration: "
            f"{', '.join(map(str, row.windows)) or 'none'}. Nothing was published: this is a bug worth "
            "reporting, with the model's name"
        )
    return float(errors[worst])


def pytorch_logits(model: PreTrainedModel, row: LongRow) -> torch.Tensor:
    """Return (compared, vocabulary) float64: the logits of one forward pass; only those positions are projected."""
    places = torch.tensor(sum(row.compared, ())) - 1

    def only_compared(head: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return arguments[0][:, places]

    handle = model.get_output_embeddings().register_forward_pre_hook(only_compared)
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0]
    finally:
        handle.remove()
    return logits.double()


def long_row_errors(executor: Executor, answers: LongAnswers) -> np.ndarray:
    """Return (compared,): the largest error of the log-probability of one of PyTorch's best tokens."""
    row, errors, past, expected = answers.row, [], 0, iter(zip(answers.best, answers.logprobs, strict=True))
    for cut, compared in zip(row.cuts, row.compared, strict=True):
        piece, logits_positions = np.array([row.tokens[past:cut]], np.int64), np.array(compared) - past - 1
        for logits in executor.run(0, piece, np.array([past], np.int64), logits_positions):
            best, known = next(expected)
            shifted = logits.astype(np.float64) - logits.max()
            logprobs = shifted - np.log(np.exp(shifted).sum())
            errors.append(np.abs(logprobs[best] - known).max())
        past = cut
    return np.array(errors)
