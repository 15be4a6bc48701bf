"""Interface between the decode loop and its executors, and what they share. Knows shapes; knows no engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ...contract import CacheType, LayerShape
from ..blocks import Blocks

if TYPE_CHECKING:
    from ..reading import Reader

Infer = Callable[["dict[str, np.ndarray]"], "Mapping[str, np.ndarray]"]


class EngineModel(Protocol):
    """Triton model that runs the graph; returns the named outputs, or all if none is named."""

    def __call__(self, feeds: "dict[str, Any]", outputs: "Sequence[str]" = ()) -> "Mapping[str, Any]": ...


@dataclass(frozen=True)
class Geometry:
    """Shape of the arena: `layers` has each layer's (heads, head size); `cache` is the type of keys and values.

    `blocks`: number of blocks, for an executor whose slots share blocks; None: enough for all slots to be full.
    """

    slots: int
    max_length: int
    vocabulary: int
    layers: tuple[tuple[int, int], ...]
    cache: "CacheType" = "float32"
    blocks: "int | None" = None

    @staticmethod
    def pairs(layers: "Sequence[LayerShape]") -> "tuple[tuple[int, int], ...]":
        """Return (heads, head size) of each of `layers`, as serving.json gives them."""
        return tuple((layer.heads, layer.size) for layer in layers)

    def allocate(self) -> dict[str, np.ndarray]:
        """Allocate each layer's keys and values, (slots, heads, max_length, size), by the graph's input names."""
        return {
            f"{kind}_{index}": np.zeros((self.slots, heads, self.max_length, size), self.cache)
            for index, (heads, size) in enumerate(self.layers)
            for kind in ("key", "value")
        }


class Part(NamedTuple):
    """Arguments of `Executor.run`."""

    first: int
    tokens: np.ndarray
    lengths: np.ndarray
    wanted: "np.ndarray | None" = None


@dataclass(frozen=True)
class Candidates:
    """Tokens with the highest logits at each wanted place, best first; ties go to the lower id.

    `tokens`: (wanted, count) int64; `logits`: the same in float32.
    """

    tokens: np.ndarray
    logits: np.ndarray

    def __getitem__(self, rows: "slice | list[int]") -> "Candidates":
        return Candidates(self.tokens[rows], self.logits[rows])


@dataclass(frozen=True)
class Likeliest(Candidates):
    """Candidates, and for each wanted place the log-sum-exp of all logits, `totals`: (wanted, 1) float32."""

    totals: np.ndarray

    def __getitem__(self, rows: "slice | list[int]") -> "Likeliest":
        return Likeliest(self.tokens[rows], self.logits[rows], self.totals[rows])


class Executor(ABC):
    """Runs tokens of some slots, and copies a slot. Each executor decides where keys and values are stored.

    `blocks`: which slot has which blocks, where slots share memory; None: each slot has room for `max_length` tokens.
    `guesses`: True if it may run guessed tokens, because several tokens of one row take about as long as one, so that
    guessing pays, and because a wrong guess leaves no trace in the cache.
    `candidates`: how many candidates `best` finds; 0: `run` returns all logits anyway.
    `searches`: True if it has `likeliest`.
    `joins`: True if texts that begin in adjacent slots run as one call, because reading the weights once for several
    costs less than once for each.
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

        `wanted`: the tokens after which logits are needed, at least one, in any order, (wanted,) int64: places in
        `tokens`, counted through all rows; if None, each row's last.
        Returns logits (wanted, vocabulary) float32 in that order; valid until the next call.
        """

    def run_together(self, parts: "Sequence[Part]") -> "list[np.ndarray]":
        """Run `parts`, which are of different slots, in one call; return what `run` returns for each.

        Requires `blocks`, or `joins` with each part one row of an empty slot, in the order of adjacent slots.
        """
        raise NotImplementedError(f"{type(self).__name__} runs one part a call: rows of one have one length")

    def best(self, parts: "Sequence[Part]") -> "list[Candidates]":
        """Run `parts` like `run` or `run_together`, but return only the highest logits. Requires `candidates`."""
        raise NotImplementedError(f"{type(self).__name__} returns all logits")

    def likeliest(self, part: "Part", count: int) -> Likeliest:
        """Run `part` like `run`, but return the `count` highest logits (all of fewer tokens) and their totals.

        Valid until the next call. Requires `searches`.
        """
        raise NotImplementedError(f"{type(self).__name__} returns all logits")

    def reader(self, token_budget: int) -> "Reader | None":
        """Return what encodes the sources of requests, `token_budget` padded tokens a call; None for a decoder."""
        return None

    @abstractmethod
    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy positions `start` to `length` of a slot to another."""


def copy_slot(arena: Mapping[str, np.ndarray], source: int, target: int, length: int, start: int) -> None:
    """Implement `Executor.copy` for an arena in this process's memory: tensors of (slots, heads, max_length, size)."""
    for tensor in arena.values():
        tensor[target, :, start:length] = tensor[source, :, start:length]


def last_of_rows(tokens: np.ndarray) -> np.ndarray:
    """Return the place of each row's last token, counted through all rows of (rows, new)."""
    rows, new = tokens.shape
    return np.arange(new - 1, rows * new, new)


class Step:
    """Small inputs of one call, allocated once for a range of slots and filled in place."""

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
        """Fill the inputs; `counts`, (rows,): how many of each padded row's tokens are its own."""
        feeds, new = self.feeds, tokens.shape[1]
        feeds["input_ids"][:] = tokens
        feeds["position_ids"][:] = lengths[:, None] + np.arange(new)
        feeds["seqlens_k"][:] = lengths + (new if counts is None else counts) - 1
        feeds["total_sequence_length"][...] = lengths.max() + new
        feeds["logits_positions"][:] = wanted
