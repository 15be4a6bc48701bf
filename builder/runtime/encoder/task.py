"""Define the base of every task: a request becomes a job, the job's texts become rows, and their outputs an answer.

Knows texts, token rows and numpy outputs; knows nothing about Triton or the engine behind `infer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Encoding

from ..contract import EncoderServing
from ..fields import Field, InputError, Tensors, option
from .text import Text, TextEncoder, Truncation

if TYPE_CHECKING:
    from ..lora import Adapter

Outputs = Mapping[str, np.ndarray]
HEADLESS = "headless"  # the parameter of a classifier whose head has random weights: each request names an adapter's
OWN_LABELS = "own_labels"  # the parameter of a classifier whose adapters may have labels of their own


@dataclass
class EncodingJob:
    """One request: its texts in the order of its rows, its options, and the truncation of its texts, if any."""

    texts: list[Text]
    options: dict[str, Any]
    truncate: bool
    truncation: Truncation | None = None


@dataclass
class Row:
    """One row of the engine's batch.

    `feeds` are per-row inputs beyond the tokeniser's, each 1-D int64. `adapter`: None for the model as it is.
    """

    encoding: Encoding
    source: int
    truncated: bool = False
    feeds: dict[str, list[int]] = field(default_factory=dict)
    adapter: Adapter | None = field(default=None, kw_only=True)  # after those of subclasses


class Task:
    """Base of the tasks. A subclass declares its tensors, reads a request and makes the answer from outputs."""

    offsets = False  # True if the answer needs the places of tokens in texts or words, which cost tokenisation time
    split_words = False  # True if a text is a list of words already
    takes_windows = False  # True if a request may ask to have a long text read in windows
    strategy = "longest_first"  # the side that `truncate` cuts, as in the reference pipeline

    def __init__(self, serving: EncoderServing, text: TextEncoder, folder: Path) -> None:
        """`folder`: of the version, with the task's own files."""
        self.parameters = serving.parameters
        self.max_length = serving.max_length
        self.truncate = serving.truncate
        self.limits = serving.limits
        self.text = text

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        """Return the task's own input tensors; `truncate` is added to each task's."""
        raise NotImplementedError

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        """Return the task's own output tensors; `truncated` is added to each task's."""
        raise NotImplementedError

    def read(self, tensors: Tensors) -> EncodingJob:
        """Check one request and return its texts and options. Raises InputError."""
        raise NotImplementedError

    def answer_without_engine(self, job: EncodingJob) -> dict[str, np.ndarray] | None:
        """Return all outputs of a request that needs no engine, here of none. Raises InputError."""
        return None

    def answer(self, job: EncodingJob, rows: Sequence[Row], outputs: Sequence[Outputs]) -> dict[str, np.ndarray]:
        """Make the output tensors, shape (rows of the request, ...), from each row's outputs.

        The outputs have no batch axis and keep padded positions. Pad lists that are shorter than the longest.
        """
        raise NotImplementedError

    def rows(self, job: EncodingJob, encodings: Sequence[Encoding]) -> list[Row]:
        """Make engine rows from the encodings of `job.texts`. Raises InputError for a text that is too long."""
        return [self._fit(job, source, encoding) for source, encoding in enumerate(encodings)]

    def _fit(self, job: EncodingJob, source: int, encoding: Encoding) -> Row:
        if len(encoding) <= self.max_length:
            return Row(encoding, source)
        if not job.truncate:
            raise InputError(
                f"row {source} has {len(encoding)} tokens; the limit of this model is {self.max_length}: "
                + self.too_long
            )
        cut = self.text([job.texts[source]], Truncation(self.max_length, self.strategy))[0]
        return Row(cut, source, truncated=True)

    def refuse_many(self, tokens: int, rows: int) -> None:
        """Raise InputError if the rows of a request have more tokens than the model takes at once."""
        most = self.limits.request_tokens
        if tokens > most:
            raise InputError(
                f"the request has {tokens} tokens in {rows} rows; this model takes at most {most} at once "
                "(serving.limits.request_tokens of its build): send several requests"
            )

    @property
    def too_long(self) -> str:
        """Return what a client can do about a text that is too long."""
        windows = ", or windows=true to have all of it read in windows" if self.takes_windows else ""
        return f"shorten the text, or send truncate=true to have it cut{windows}"

    def named_prompt(self, tensors: Tensors) -> str:
        """Return the checkpoint's prompt that a request names, or the default; empty for none. Raises InputError."""
        prompts: Mapping[str, str] = self.parameters["prompts"]
        name = option(tensors, "prompt_name", self.parameters["default_prompt"]) if prompts else None
        if name is not None and name not in prompts:
            raise InputError(f"prompt_name is {name!r}; this model has {', '.join(sorted(prompts))}")
        return prompts[name] if name is not None else ""

    def wants_truncation(self, tensors: Tensors) -> bool:
        return bool(option(tensors, "truncate", self.truncate))


TRUNCATE = Field("truncate", "TYPE_BOOL", optional=True)
TRUNCATED = Field("truncated", "TYPE_BOOL")
PROMPT_TOKENS = Field("prompt_tokens", "TYPE_INT32")  # tokens that the engine read for a row, without padding
