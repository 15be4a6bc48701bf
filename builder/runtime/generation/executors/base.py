"""What the decode loop needs of an executor, and what the executors share. Knows shapes; knows no engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...contract import CacheType, LayerShape
from ..blocks import Blocks

Infer = Callable[["dict[str, np.ndarray]"], "Mapping[str, np.ndarray]"]


class EngineModel(Protocol):
    """A Triton model that runs the graph: the outputs that are wanted, by name; all where none is named."""

    def __call__(self, feeds: "dict[str, Any]", outputs: "Sequence[str]" = ()) -> "Mapping[str, Any]": ...


@dataclass(frozen=True)
class Geometry:
    """The arena: `layers` holds each layer's (heads, head size); `cache` is the type of keys and values.

    `blocks`: of an executor whose slots share blocks, how many there are; None: enough for all slots to be full.
    """

    slots: int
    max_length: int
    vocabulary: int
    layers: tuple[tuple[int, int], ...]
    cache: "CacheType" = "float32"
    blocks: "int | None" = None

    @staticmethod
    def pairs(layers: "Sequence[LayerShape]") -> "tuple[tuple[int, int], ...]":
        """(heads, head size) of each of `layers`, as serving.json states them."""
        return tuple((layer.heads, layer.size) for layer in layers)

    def allocate(self) -> dict[str, np.ndarray]:
        """Each layer's keys and values, (slots, heads, max_length, size), by the names of the graph's inputs."""
        return {
            f"{kind}_{index}": np.zeros((self.slots, heads, self.max_length, size), self.cache)
            for index, (heads, size) in enumerate(self.layers)
            for kind in ("key", "value")
        }


@dataclass(frozen=True)
class CrossGeometry:
    """What decoder layers attend to: each layer's (heads, head size), for texts of up to `max_length` tokens.

    `beams`: how many slots may attend to one text.
    """

    max_length: int
    beams: int
    layers: tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """What `Executor.run` takes."""

    first: int
    tokens: np.ndarray
    lengths: np.ndarray
    wanted: "np.ndarray | None" = None


@dataclass(frozen=True)
class Candidates:
    """The tokens with the highest logits after each that was wanted, best first, of equal ones the lower id first.

    `tokens`: (wanted, count) int64; `logits`: the same in float32.
    """

    tokens: np.ndarray
    logits: np.ndarray

    def __getitem__(self, rows: "slice | list[int]") -> "Candidates":
        return Candidates(self.tokens[rows], self.logits[rows])


@dataclass(frozen=True)
class Likeliest(Candidates):
    """Those, and of each wanted the logarithm of the sum of all logits' exponentials, `totals`: (wanted, 1) float32."""

    totals: np.ndarray

    def __getitem__(self, rows: "slice | list[int]") -> "Likeliest":
        return Likeliest(self.tokens[rows], self.logits[rows], self.totals[rows])


class Executor(ABC):
    """Runs tokens of some slots, and copies a slot. Where keys and values lie is each executor's own matter.

    `blocks`: which slot has which blocks, where slots share memory; None: each slot has room for `max_length` tokens.
    `guesses`: whether it may be asked to run guesses of what comes next, because several tokens of one row take about
    as long as one, so that guessing pays, and because a wrong guess leaves no trace in the cache.
    `candidates`: how many `best` finds; 0: all logits are here anyway.
    `searches`: whether it has `likeliest`.
    `joins`: whether texts that begin in slots beside one another run as one call, because one reading of the weights
    for several costs less than one for each.
    """

    blocks: "Blocks | None" = None
    guesses = False
    candidates = 0
    searches = False
    joins = False

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @abstractmethod
    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: "np.ndarray | None" = None
    ) -> np.ndarray:
        """Append `tokens`, (rows, new) int64, to the slots from `first` on, which hold `lengths` tokens each.

        `wanted`: the tokens after which logits are wanted, at least one, in any order, (wanted,) int64: places in
        `tokens`, counted through all rows; each row's last where there is none.
        Returns logits (wanted, vocabulary) float32 in that order; valid until the next call.
        """

    def run_together(self, parts: "Sequence[Part]") -> "list[np.ndarray]":
        """What `run` returns for each of `parts`, which are of different slots, from one call.

        With `blocks`, or with `joins` where each is one row of an empty slot, in the order of slots beside one another.
        """
        raise NotImplementedError(f"{type(self).__name__} runs one part a call: rows of one have one length")

    def best(self, parts: "Sequence[Part]") -> "list[Candidates]":
        """What `run` or `run_together` does, but of the logits the highest alone. With `candidates` only."""
        raise NotImplementedError(f"{type(self).__name__} returns all logits")

    def likeliest(self, part: "Part", count: int) -> Likeliest:
        """What `run` does, but of the logits the `count` highest alone, or of fewer tokens all, and their totals.

        Valid until the next call. With `searches` only.
        """
        raise NotImplementedError(f"{type(self).__name__} returns all logits")

    @abstractmethod
    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy positions `start` to `length` of a slot to another."""


class EncodingExecutor(Executor):
    """An executor whose rows also attend to a text, which is encoded once, for all beams that answer it."""

    @abstractmethod
    def encode(self, rows: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        """Keys and values of each text, a tensor a layer and kind: (heads, length, size)."""

    @abstractmethod
    def attach(self, position: int, encoded: list[np.ndarray]) -> None:
        """Put what `encode` made of one text at a place of the arena."""

    @abstractmethod
    def assign(self, slot: int, position: int, beam: int) -> None:
        """Let `slot` attend to `position`, as the `beam`-th of those that do; to none for -1."""


def copy_slot(arena: Mapping[str, np.ndarray], source: int, target: int, length: int, start: int) -> None:
    """`Executor.copy` of an arena in this process's memory: tensors of (slots, heads, max_length, size)."""
    for tensor in arena.values():
        tensor[target, :, start:length] = tensor[source, :, start:length]


def last_of_rows(tokens: np.ndarray) -> np.ndarray:
    """The place of each row's last token, counted through all rows of (rows, new)."""
    rows, new = tokens.shape
    return np.arange(new - 1, rows * new, new)


class Step:
    """The small inputs of one call, allocated once for a range of slots and filled in place."""

    def __init__(self, rows: int, new: int, wanted: int) -> None:
        self.feeds: dict[str, np.ndarray] = {
            "input_ids": np.zeros((rows, new), np.int64),
            "position_ids": np.zeros((rows, new), np.int64),
            "seqlens_k": np.zeros(rows, np.int32),
            "total_sequence_length": np.zeros(1, np.int32),
            "logits_positions": np.zeros(wanted, np.int64),
        }

    def fill(
        self, tokens: np.ndarray, lengths: np.ndarray, wanted: np.ndarray, counts: "np.ndarray | None" = None
    ) -> None:
        """`counts`: (rows,), how many of each row's tokens are its own, where rows are padded."""
        feeds, new = self.feeds, tokens.shape[1]
        feeds["input_ids"][:] = tokens
        feeds["position_ids"][:] = lengths[:, None] + np.arange(new)
        feeds["seqlens_k"][:] = lengths + (new if counts is None else counts) - 1
        feeds["total_sequence_length"][...] = lengths.max() + new
        feeds["logits_positions"][:] = wanted
