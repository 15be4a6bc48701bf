"""Rows of token ids such as a checkpoint's tokeniser makes: its special tokens around ordinary ones.

Some heads need the special tokens: one that pools at the end token answers no row without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from builder.checkpoints.checkpoint import Checkpoint
from builder.common.samples import TEXTS

MASKS = 3  # positions of a row, for the tasks that ask for some
MAX_LABELS = 6
TASK_INPUTS = {  # inputs of tasks, and their second axes
    "positions": "masks",
    **{name: name for name in ("words", "labels", "fields", "choices", "prompts")},
}


@dataclass(frozen=True)
class Rows:
    """Parts of which rows are made. `types`: how many token types the model knows; `ordinary`: ids, ascending."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    ordinary: np.ndarray
    pad: int
    types: int

    def feeds(self, names: Sequence[str], lengths: Sequence[int], seed: int = 0) -> dict[str, np.ndarray]:
        """Return a batch of random rows of `lengths` tokens, padded on the right: int64, (rows, longest).

        A row does not depend on the others. Inputs that the tokeniser does not make are positions, (rows, n).
        """
        generators = [np.random.default_rng([seed, row]) for row in range(len(lengths))]
        rows = [self._row(length, generator) for length, generator in zip(lengths, generators, strict=True)]
        feeds = {}
        for name in names:
            padding, longest = self.pad if name == "input_ids" else 0, max(len(row[name]) for row in rows)
            padded = [np.pad(row[name], (0, longest - len(row[name])), constant_values=padding) for row in rows]
            feeds[name] = np.stack(padded)
        return feeds

    def _row(self, length: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
        ids = generator.choice(self.ordinary, length).astype(np.int64)
        if length > len(self.before) + len(self.after):
            ids[: len(self.before)] = self.before
            ids[length - len(self.after) :] = self.after
        return {
            "input_ids": ids,
            "attention_mask": np.ones(length, dtype=np.int64),
            "token_type_ids": generator.integers(0, self.types, length),
            "positions": generator.integers(0, length, MASKS),
            "words": np.arange(1, max(2, length - 1), 2),
            "labels": np.arange(max(1, min(length - 1, MAX_LABELS))),
            "fields": np.arange(1, max(2, min(length - 1, MAX_LABELS)), 2),
            "choices": np.arange(max(1, min(length - 2, MAX_LABELS))),
            "prompts": np.arange(0, max(1, min(length - 1, MAX_LABELS)), 3),
        }


def rows_of(checkpoint: Checkpoint) -> Rows:
    """Return the special tokens that the tokeniser puts around a text, and the ids that a text is made of."""
    tokenizer, config = checkpoint.tokenizer, checkpoint.config
    encoded = tokenizer(TEXTS[0], return_special_tokens_mask=True)
    special = np.array(encoded["special_tokens_mask"], dtype=bool)
    ordinary = np.flatnonzero(~special)
    ids = encoded["input_ids"]
    known = np.arange(config.vocab_size // 4, config.vocab_size)
    return Rows(
        before=tuple(ids[: ordinary[0]]),
        after=tuple(ids[ordinary[-1] + 1 :]),
        ordinary=np.setdiff1d(known, tokenizer.all_special_ids),
        pad=padding_id(checkpoint),
        types=min(2, getattr(config, "type_vocab_size", None) or 1),
    )


def padding_id(checkpoint: Checkpoint) -> int:
    """Return the id that rows are padded with: the model's own padding, if it has one, before the tokeniser's.

    Models that count positions or look for a row's last token by comparing ids compare with their own.
    """
    for token in (checkpoint.config.pad_token_id, checkpoint.tokenizer.pad_token_id):
        if token is not None and 0 <= token < checkpoint.config.vocab_size:
            return int(token)
    return 0
