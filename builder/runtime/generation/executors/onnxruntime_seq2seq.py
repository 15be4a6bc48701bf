"""Execute encoder-decoders: a decoder in this process that also attends to texts, which it encodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import GenerationServing, Session
from ...sessions import open_session
from .base import CallPart, Geometry, ScoredCandidates
from .encoding import CrossGeometry, EncodingExecutor
from .onnxruntime import MAX_BINDINGS, InProcess, bind_likeliest


def open_executor(folder: Path, serving: GenerationServing, geometry: Geometry) -> "CrossAttending":
    """Open the graphs of encoder and decoder in `folder` that serving.json names."""
    assert serving.model is not None
    assert serving.source is not None
    source = serving.source
    cross = CrossGeometry(source.max_length, serving.beams, Geometry.pairs(source.layers))
    return CrossAttending(folder / serving.model, folder / source.encoder, geometry, cross, serving.session)


class TextArena:
    """Keys and values of texts, one place for each text, and which slots attend to which place."""

    def __init__(self, places: int, cross: CrossGeometry) -> None:
        self.cross = cross
        self.cross_arena = {
            f"cross_{kind}_{index}": np.zeros((places, heads, cross.max_length, size), np.float32)
            for index, (heads, size) in enumerate(cross.layers)
            for kind in ("key", "value")
        }
        self.last = np.zeros((places, 1, 2 * sum(heads * size for heads, size in cross.layers)), np.float32)
        self.lengths = np.ones(places, np.int32)  # of the texts
        self.place_of = np.full(places, -1, np.int64)
        self.beam_of = np.zeros(places, np.int64)

    def attach(self, position: int, encoded: "list[np.ndarray]") -> None:
        """Copy what `encode` returned for one text to a place of the arena."""
        self.lengths[position] = encoded[0].shape[1]
        ends = []
        for tensor, values in zip(self.cross_arena.values(), encoded):
            tensor[position, :, : values.shape[1]] = values
            ends.append(values[:, -1].ravel())
        self.last[position, 0] = np.concatenate(ends)

    def assign(self, slot: int, position: int, beam: int) -> None:
        """Let `slot` attend to `position` as its `beam`-th slot; to none for -1."""
        self.place_of[slot], self.beam_of[slot] = position, beam


@dataclass(frozen=True)
class BoundStep:
    """Inputs of a step by name, their binding, and its outputs: logits and, if requested, the most probable tokens."""

    feeds: "dict[str, np.ndarray]"
    binding: Any
    logits: np.ndarray
    likeliest: "ScoredCandidates | None"


class CrossAttending(InProcess, EncodingExecutor):
    """Decoder that also attends to an encoded text, whose keys and values its beams share.

    A step binds these keys and values where they are, and moves none of them.
    """

    can_speculate = False  # a step has one token a row

    def __init__(
        self,
        decoder: Path,
        encoder: Path,
        geometry: Geometry,
        cross: CrossGeometry,
        session: Session,
    ) -> None:
        super().__init__(decoder, geometry, session)
        self.encoder = open_session(encoder, session)
        self.bound: dict[tuple[int, ...], BoundStep] = {}
        self.texts = TextArena(geometry.slots, cross)

    def encode(self, rows: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        longest = max(map(len, rows))
        ids, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        outputs = self.encoder.run(list(self.texts.cross_arena), {"input_ids": ids, "attention_mask": mask})
        return [[output[row, :, : len(tokens)] for output in outputs] for row, tokens in enumerate(rows)]

    def attach(self, position: int, encoded: list[np.ndarray]) -> None:
        self.texts.attach(position, encoded)

    def assign(self, slot: int, position: int, beam: int) -> None:
        self.texts.assign(slot, position, beam)

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: "np.ndarray | None" = None
    ) -> np.ndarray:
        return self._step(CallPart(first, tokens, lengths, logits_positions), 0).logits

    def likeliest(self, part: CallPart, count: int) -> ScoredCandidates:
        likeliest = self._step(part, min(count, self.geometry.vocabulary)).likeliest
        assert likeliest is not None, "as many as asked for"
        return likeliest

    def _step(self, part: CallPart, count: int) -> BoundStep:
        """Run one token a row, and find the `count` most probable next ones."""
        first, tokens, lengths, logits_positions = part.first, part.tokens, part.lengths, part.logits_indices
        rows = len(tokens)
        places, beams = self.texts.place_of[first : first + rows], self.texts.beam_of[first : first + rows]
        used = int(places.max()) + 1
        key = (first, rows, used, len(logits_positions), count)
        if key not in self.bound:
            if len(self.bound) >= MAX_BINDINGS:
                self.bound.clear()
            self.bound[key] = self._bind_cross(*key)
        step = self.bound[key]
        feeds = step.feeds
        feeds["input_ids"][:] = tokens
        feeds["position_ids"][:] = lengths[:, None]
        feeds["seqlens_k"][:] = lengths
        feeds["total_sequence_length"][:] = lengths.max() + 1
        feeds["logits_positions"][:] = logits_positions
        feeds["cross_places"][:] = np.maximum(places, 0) * self.texts.cross.beams + beams
        attending = np.flatnonzero(places >= 0)
        feeds["cross_rows"][:] = 0
        feeds["cross_rows"][places[attending], beams[attending]] = attending
        feeds["cross_seqlens_k"][:] = 0  # a place to which no slot attends costs one key
        feeds["cross_seqlens_k"][places[attending]] = self.texts.lengths[places[attending]] - 1
        feeds["cross_total"][:] = feeds["cross_seqlens_k"].max() + 1
        self.session.run_with_iobinding(step.binding)
        return step

    def _bind_cross(self, first: int, rows: int, used: int, num_logits: int, count: int) -> BoundStep:
        step, binding = self._bind(first, rows, 1, num_logits, count)
        feeds = {
            **step.feeds,
            "cross_rows": np.zeros((used, self.texts.cross.beams), np.int64),
            "cross_places": np.zeros(rows, np.int64),
            "cross_seqlens_k": np.zeros(used, np.int32),
            "cross_total": np.zeros(1, np.int32),
        }
        views = {name: feeds[name] for name in feeds if name.startswith("cross_")}
        views["cross_last"] = self.texts.last[:used]
        for name, tensor in self.texts.cross_arena.items():
            view = tensor[:used]
            views[f"past_{name}"] = view
            binding.bind_output(f"present_{name}", "cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
        for name, view in views.items():
            if name in self.inputs:
                binding.bind_input(name, "cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
        logits = self._bind_logits(binding, num_logits)
        return BoundStep(feeds, binding, logits, bind_likeliest(binding, num_logits, count) if count else None)
