"""Requests to a decode loop without a server: what was asked, and what came back."""

from __future__ import annotations

from typing import Any

from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.sampling import Sampler
from builder.runtime.generation.sequences import AnswerPiece, GeneratedSequence, Request
from builder.runtime.generation.text import Detokenizer, StopStrings


class Letters(Detokenizer):
    """Detokeniser with one letter per token."""

    def __init__(self) -> None: ...

    def push(self, token: int) -> str:
        return chr(ord("A") + token)

    def flush(self) -> str:
        return ""


class Asked:
    """One request, and its outcome."""

    def __init__(self, prompt: list[int], count: int, ends: tuple[int, ...] = (), **options: Any) -> None:
        self.pieces: list[AnswerPiece] = []
        self.errors: list[Exception] = []
        deadline = options.pop("deadline", None)
        self.request = Request(
            prompt,
            RequestOptions(**{"temperature": 0.0, **options}),
            count,
            self.pieces.append,
            self.errors.append,
            deadline,
        )
        self.sequences = [
            GeneratedSequence(
                self.request,
                Sampler(Rules(self.request.options, ends), stream=index, prompt=prompt),
                Letters(),
                StopStrings(self.request.options.stop_words),
                frozenset(ends),
            )
            for index in range(self.request.options.n)
        ]

    @property
    def tokens(self) -> list[int]:
        return self.sequences[0].sampler.generated

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)
