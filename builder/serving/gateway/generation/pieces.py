"""Read the pieces of a generating model's answers, and count their tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from builder.serving.gateway.tensors import Outputs

IMPOSSIBLE = -9999.0  # OpenAI's log-probability of an impossible token


@dataclass(frozen=True)
class Piece:
    """One piece of a sequence: text, log-probabilities of its tokens and, in the last piece, the finish reason.

    The last piece carries the token counts; on request, every piece does. `thinking`: set in a first piece if the
    prompt ends with the mark that begins the model's reasoning.
    """

    index: int
    text: str
    logprobs: list[dict[str, Any]] | None
    finish_reason: str | None = None
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float | None = None
    thinking: bool = False


@dataclass
class Completion:
    """Complete text of one sequence."""

    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs or []
        self.finish_reason = piece.finish_reason or self.finish_reason


@dataclass
class TokenUsage:
    """Tokens of an answer so far."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    counted: set[int] = field(default_factory=set)  # numbers of the prompts that were counted
    ended: set[int] = field(default_factory=set)

    def add(self, piece: Piece, prompt: int = 0) -> None:
        """Add a piece's tokens and, once for each prompt, the prompt's tokens."""
        self.completion += piece.completion_tokens
        if piece.prompt_tokens and prompt not in self.counted:
            self.counted.add(prompt)
            self.prompt += piece.prompt_tokens
        if piece.finish_reason is not None and prompt not in self.ended:
            self.ended.add(prompt)
            self.cached += piece.cached_tokens

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def read_pieces(outputs: Outputs) -> list[Piece]:
    """Return the pieces of one response: one piece, or all sequences of an answer that came whole."""
    texts = outputs["text_output"].strings()
    if len(outputs) == 1:  # fast path: nearly every step of a stream
        return [Piece(0, texts[0], None)]
    indices = _whole(outputs, "index") if "index" in outputs else [0]
    logprobs = _logprobs(outputs, len(texts))
    ended = "finish_reason" in outputs
    reasons = outputs["finish_reason"].strings() if ended else [None] * len(texts)
    of_each = "num_output_tokens" in outputs
    counted = of_each or ended
    counts = _whole(outputs, "num_output_tokens" if of_each else "completion_tokens") if counted else [0] * len(texts)
    prompt = _whole(outputs, "num_input_tokens" if of_each else "prompt_tokens")[0] if counted else 0
    cached = _whole(outputs, "cached_tokens")[0] if "cached_tokens" in outputs else 0
    waited = float(outputs["queue_seconds"].array().item()) if "queue_seconds" in outputs else None
    thinking = "thinking" in outputs
    return [
        Piece(index, text, entry, reason, count, prompt, cached, waited, thinking)
        for index, text, entry, reason, count in zip(indices, texts, logprobs, reasons, counts, strict=True)
    ]


def _whole(outputs: Outputs, name: str) -> list[int]:
    """Return the integers of an output, whose shape may begin with a batch dimension of 1."""
    return outputs[name].array().ravel().tolist()


def _logprobs(outputs: Outputs, texts: int) -> list[list[dict[str, Any]] | None]:
    """Return the tokens of each text with their log-probabilities, an echoed prompt's first; None if not requested."""
    if "logprobs_output" not in outputs:
        return [None] * texts
    prompt = json.loads(outputs["prompt_logprobs_output"].strings()[0]) if "prompt_logprobs_output" in outputs else []
    return [prompt + json.loads(entry) for entry in outputs["logprobs_output"].strings()]
