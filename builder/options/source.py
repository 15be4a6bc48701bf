"""Choice of the checkpoint to build."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """`model`: a Hub id or a local folder; the rest is None if the checkpoint itself decides."""

    model: str
    revision: str | None = None
    task: str | None = None
    max_length: int | None = None
    pooling: str | None = None
