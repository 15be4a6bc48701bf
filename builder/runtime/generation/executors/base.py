"""Define the interface of executors to the decode loop, and helpers that they share. Knows shapes; knows no engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ...contract import CacheType, LayerShape
from ..block_manager import BlockManager

if TYPE_CHECKING:
    from ...lora import LoraStacks
    from ..encoder_cache import EncoderCache

# above the usual top_k of requests, and below the limit of newer CUDA kernels (256, topk_hybrid.cuh)
MAX_CANDIDATES = 128
TOP_LOGITS, TOP_TOKENS = "top_logits", "top_tokens"  # outputs of a graph that finds candidates
TOP_TOTALS, TOP_COUNT = "top_totals", "top_count"  # for searches: an output, and the input with the count
# For drafts that read hidden states: an output of the target and input of the draft, and outputs of the draft.
HIDDEN_STATES, NEXT_TOKENS, NEXT_HIDDEN_STATES = "hidden_states", "next_tokens", "next_hidden_states"
Infer = Callable[["dict[str, np.ndarray]"], "Mapping[str, np.ndarray]"]


class EngineModel(Protocol):
    """Triton model that runs the graph; returns the named outputs, or all if none is named."""

    def __call__(self, feeds: "dict[str, Any]", outputs: "Sequence[str]" = ()) -> "Mapping[str, Any]": ...


@dataclass(frozen=True)
class Geometry:
    """Shape of the arena: `layers` has each layer's (heads, head size); `cache` is the type of keys and values.

    `blocks`: number of blocks, for an executor whose slots share blocks; None: enough for all slots to be full.
    `states`: the shapes of each layer's states; empty if no layer has any.
    """

    slots: int
    max_length: int
    vocabulary: int
    layers: tuple[tuple[int, int], ...]
    cache: "CacheType" = "float32"
    blocks: "int | None" = None
    states: "tuple[tuple[tuple[int, ...], ...], ...]" = ()

    @staticmethod
    def pairs(layers: "Sequence[LayerShape]") -> "tuple[tuple[int, int], ...]":
        """Return (heads, head size) of each of `layers`, as serving.json gives them."""
        return tuple((layer.heads, layer.size) for layer in layers)

    @staticmethod
    def states_of(layers: "Sequence[LayerShape]") -> "tuple[tuple[tuple[int, ...], ...], ...]":
        """Return the shapes of the states of each of `layers`; empty if none has any."""
        states = tuple(tuple(tuple(shape) for shape in layer.states) for layer in layers)
        return states if any(states) else ()

    def allocate(self) -> dict[str, np.ndarray]:
        """Allocate each layer's keys and values, (slots, heads, max_length, size), by the graph's input names."""
        return {
            f"{kind}_{index}": np.zeros((self.slots, heads, self.max_length, size), self.cache)
            for index, (heads, size) in enumerate(self.layers)
            for kind in ("key", "value")
            if heads
        }


class CallPart(NamedTuple):
    """Arguments of `Executor.run`."""

    first: int
    tokens: np.ndarray
    lengths: np.ndarray
    logits_positions: "np.ndarray | None" = None

    @property
    def logits_indices(self) -> np.ndarray:
        """Indices of the tokens after which logits are needed."""
        return last_of_rows(self.tokens) if self.logits_positions is None else self.logits_positions


@dataclass(frozen=True)
class TokenCandidates:
    """Tokens with the highest logits at each position, best first; ties go to the lower id.

    On a GPU only they leave the device, not all logits (builder/graphs/onnx/candidates.py).
    `tokens`: (positions, count) int64; `logits`: the same in float32.
    """

    tokens: np.ndarray
    logits: np.ndarray

    def __getitem__(self, rows: "slice | list[int]") -> "TokenCandidates":
        return TokenCandidates(self.tokens[rows], self.logits[rows])

    def in_order(self) -> "TokenCandidates":
        """Sort equal logits by token: CUDA's TopK returns them as its threads found them (topk_impl.cuh)."""
        order = np.lexsort((self.tokens, -self.logits), axis=-1)
        return TokenCandidates(*(np.take_along_axis(part, order, axis=-1) for part in (self.tokens, self.logits)))


@dataclass(frozen=True)
class ScoredCandidates(TokenCandidates):
    """Candidates with the log-sum-exp of all logits at each position, `totals`: (positions, 1) float32.

    On a CPU a beam search reads them instead of all logits (builder/graphs/onnx/likeliest.py).
    """

    totals: np.ndarray

    def __getitem__(self, rows: "slice | list[int]") -> "ScoredCandidates":
        return ScoredCandidates(self.tokens[rows], self.logits[rows], self.totals[rows])


class DraftAnswer(NamedTuple):
    """Answer of a draft after each requested token.

    `logits`: (positions, the draft's tokens) float32; `tokens`: the most probable token of each by the target's ids,
    (positions,) int64; `hidden_states`: what the draft reads with that token, (1, positions, size) float32.
    """

    logits: np.ndarray
    tokens: np.ndarray
    hidden_states: np.ndarray


class Executor(ABC):
    """Runs tokens of some slots, and copies a slot. Each executor decides where keys and values are stored.

    `blocks`: the blocks of each slot, where slots share memory; None: each slot holds `max_length` tokens.
    `can_speculate`: True if several tokens of a row take about as long as one, and a rejected token leaves no trace in
    the cache.
    `candidates`: how many candidates `best` finds; 0: `run` returns all logits anyway.
    `has_likeliest`: True if `likeliest` is implemented.
    `joins_prefills`: True if prompts that start in adjacent slots run as one call, which reads the weights once.
    `has_states`: True if a slot keeps states besides keys and values: those after all of its tokens, and no earlier
    ones.
    `lora`: the adapters of the slots; None: the graph takes none.
    `drafts_in_place`: of a draft that reads hidden states: see HiddenStatesDrafter.
    `reads_hidden_states`: True for a draft that reads the hidden states of the model that it drafts for: `draft` is
    implemented.
    `tile_tokens`: products compute tokens in tiles of this many, and a partial tile costs far more than its share.
    """

    blocks: "BlockManager | None" = None
    can_speculate = False
    candidates = 0
    has_likeliest = False
    joins_prefills = False
    has_states = False
    lora: "LoraStacks | None" = None
    reads_hidden_states = False
    drafts_in_place = False
    tile_tokens = 1

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @abstractmethod
    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: "np.ndarray | None" = None
    ) -> np.ndarray:
        """Append `tokens`, (rows, new) int64, to the slots from `first` on, which hold `lengths` tokens each.

        `logits_positions`: indices into the flattened `tokens` after which logits are needed, at least one, in any
        order, (positions,) int64; None: each row's last. A row without any is not appended to: it fills a gap between
        rows that are.
        Returns logits (positions, vocabulary) float32 in that order; valid until the next call.
        """

    def run_together(self, parts: "Sequence[CallPart]") -> "list[np.ndarray]":
        """Run `parts`, of different slots, in one call; return what `run` returns for each.

        Requires `blocks`, or `joins_prefills` with each part one row of an empty slot, in the order of adjacent slots.
        """
        raise NotImplementedError(f"{type(self).__name__} runs one part a call")

    def best(self, parts: "Sequence[CallPart]") -> "list[TokenCandidates]":
        """Run `parts` like `run` or `run_together`, but return only the highest logits. Requires `candidates`."""
        raise NotImplementedError(f"{type(self).__name__} returns all logits")

    def likeliest(self, part: "CallPart", count: int) -> ScoredCandidates:
        """Run `part` like `run`, but return the `count` highest logits (all of fewer tokens) and their totals.

        Valid until the next call. Requires `has_likeliest`.
        """
        raise NotImplementedError(f"{type(self).__name__} returns all logits")

    def hidden_states(self, slot: int, start: int, end: int) -> np.ndarray:
        """Return what a draft reads of the tokens that `slot` caches at `start` to `end`, (1, tokens, size) float32."""
        raise NotImplementedError(f"{type(self).__name__} keeps no hidden states")

    def draft(self, part: "CallPart", hidden_states: np.ndarray) -> DraftAnswer:
        """Append the one row of `part` like `run`; the answer is valid until the next call.

        `hidden_states`, (1, tokens, size) float32: those at the token before each. Requires `reads_hidden_states`.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no hidden states")

    def draft_token(
        self, slot: int, tokens: "Sequence[int]", start: int, hidden_states: np.ndarray
    ) -> "tuple[int, np.ndarray]":
        """Append `tokens` to `slot`, which holds `start`; return the most probable next token and its hidden states.

        See `draft`. The hidden states that are returned, (1, 1, size), are at the last token.
        """
        answer = self.draft(CallPart(slot, np.array([tokens], np.int64), np.array([start], np.int64)), hidden_states)
        return int(answer.tokens[0]), answer.hidden_states

    def encoder_cache(self, token_budget: int) -> "EncoderCache | None":
        """Return the cache of an encoder-decoder's sources, which encodes `token_budget` tokens a call; else None."""
        return None

    @abstractmethod
    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy positions `start` to `length` of a slot to another."""


def copy_slot(arena: Mapping[str, np.ndarray], source: int, target: int, length: int, start: int) -> None:
    """Implement `Executor.copy` for an arena in this process's memory: tensors of (slots, heads, max_length, size)."""
    for tensor in arena.values():
        tensor[target, :, start:length] = tensor[source, :, start:length]


def last_of_rows(tokens: np.ndarray) -> np.ndarray:
    """Return the index of each row's last token in the flattened `tokens`, (rows, new)."""
    rows, new = tokens.shape
    return np.arange(new - 1, rows * new, new)


class StepInputs:
    """Small inputs of one call, allocated once and filled in place.

    `kept`: outputs beside the logits, which the executor keeps of each token.
    """

    def __init__(self, rows: int, new: int, num_logits: int) -> None:
        self.kept: dict[str, np.ndarray] = {}
        self.feeds: dict[str, np.ndarray] = {
            "input_ids": np.zeros((rows, new), np.int64),
            "position_ids": np.zeros((rows, new), np.int64),
            "seqlens_k": np.zeros(rows, np.int32),
            "total_sequence_length": np.zeros(1, np.int32),
            "logits_positions": np.zeros(num_logits, np.int64),
        }

    def fill(
        self, tokens: np.ndarray, lengths: np.ndarray, logits_positions: np.ndarray, counts: "np.ndarray | None" = None
    ) -> None:
        """Fill the inputs; `counts`, (rows,): how many of each padded row's tokens are its own."""
        feeds, new = self.feeds, tokens.shape[1]
        feeds["input_ids"][:] = tokens
        feeds["position_ids"][:] = lengths[:, None] + np.arange(new)
        feeds["seqlens_k"][:] = lengths + (new if counts is None else counts) - 1
        feeds["total_sequence_length"][...] = lengths.max() + new
        feeds["logits_positions"][:] = logits_positions
