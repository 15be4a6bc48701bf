"""Requests that a model must answer."""

from __future__ import annotations

from pydantic import Field

from builder.options.options import Options


class Load(Options):
    """Requests that the model must answer, which `build-repo plan models.yaml` plans for.

    Set in models.yaml under `load:`.
    """

    requests_per_s: float = Field(gt=0)
    """Requests a second, on average, at random times."""
    tokens: int = Field(64, ge=1)
    """Tokens of a text, or of a prompt, on average."""
    longest: int | None = Field(None, ge=1)
    """Tokens of the longest one. Default: as long as the model takes."""
    texts: int = Field(1, ge=1)
    """Texts of one request. Encoders only."""
    answer_tokens: int = Field(128, ge=1)
    """Tokens of an answer, on average. Models that generate."""
    p99_ms: float | None = Field(None, gt=0)
    """Milliseconds within which 99 of 100 requests of an encoder must be answered."""
    first_token_ms: float | None = Field(None, gt=0)
    """Milliseconds within which an answer should begin, once it has its turn. Models that generate."""
    between_tokens_ms: float | None = Field(None, gt=0)
    """Milliseconds from one token of a running answer to the next, at most. Models that generate."""
    distinct_texts: int | None = Field(None, ge=1)
    """Number of different texts that are asked again and again; Triton's response cache is then sized for them.
    Encoders only.
    """

    def shared_by(self, pods: int) -> Load:
        """Return the share of the requests of each of `pods` equal machines."""
        return self.model_copy(update={"requests_per_s": self.requests_per_s / pods})
