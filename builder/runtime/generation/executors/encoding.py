"""Extend the interface of executors for encoder-decoders. Knows shapes; knows no engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..encoder_cache import EncoderCache
from .base import Executor


@dataclass(frozen=True)
class CrossGeometry:
    """Shape of the encoded texts: (heads, head size) of each layer that attends to them.

    `max_length`: tokens of a text at most; `beams`: how many slots may attend to one text.
    """

    max_length: int
    beams: int
    layers: tuple[tuple[int, int], ...]


class EncodingExecutor(Executor):
    """Executor whose rows also attend to a text, which is encoded once, for all beams that answer it."""

    def encoder_cache(self, token_budget: int) -> EncoderCache:
        return EncoderCache(self, token_budget)

    @abstractmethod
    def encode(self, rows: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        """Return keys and values of each text, a tensor for each layer and kind: (heads, length, size)."""

    @abstractmethod
    def attach(self, position: int, encoded: list[np.ndarray]) -> None:
        """Copy what `encode` returned for one text to a place of the arena."""

    @abstractmethod
    def assign(self, slot: int, position: int, beam: int) -> None:
        """Let `slot` attend to `position` as its `beam`-th slot; to none for -1."""
