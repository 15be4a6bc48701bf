"""Running the decoder's graph over a range of slots. Three ways, one interface; device.py and handles.py have two more.

`InProcess` owns an ONNX Runtime session whose cache inputs and outputs are bound to the same buffers, so that a step
writes one position and moves nothing else; `CrossAttending` is that, with an encoder. `Remote` calls an `infer` that
takes and returns the cache as tensors: a BLS call of the engine's own Triton model. All keep the arena; all know
nothing about requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ..contract import Session

MOST_BOUND = 256  # combinations of rows and texts whose bindings are kept


@dataclass(frozen=True)
class Geometry:
    """The arena: `layers` holds each layer's (heads, head size); `cache` is the type of keys and values."""

    slots: int
    max_length: int
    vocabulary: int
    layers: tuple[tuple[int, int], ...]
    cache: str = "float32"

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


class Executor:
    """What the engine needs: to run tokens of some slots, and to copy a slot."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.arena = geometry.allocate()

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Append `tokens`, (rows, new) int64, to the slots from `first` on, which hold `lengths` tokens each.

        Returns the logits after each row's last token, (rows, vocabulary); valid until the next call.
        """
        raise NotImplementedError

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy positions `start` to `length` of a slot to another."""
        for tensor in self.arena.values():
            tensor[target, :, start:length] = tensor[source, :, start:length]


class Step:
    """The small inputs of one call, allocated once for a range of slots and filled in place."""

    def __init__(self, rows: int, new: int) -> None:
        self.feeds: dict[str, np.ndarray] = {
            "input_ids": np.zeros((rows, new), np.int64),
            "position_ids": np.zeros((rows, new), np.int64),
            "seqlens_k": np.zeros(rows, np.int32),
            "total_sequence_length": np.zeros(1, np.int32),
            "logits_index": np.full(rows, new - 1, np.int64),
        }

    def fill(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        feeds, new = self.feeds, tokens.shape[1]
        feeds["input_ids"][:] = tokens
        feeds["position_ids"][:] = lengths[:, None] + np.arange(new)
        feeds["seqlens_k"][:] = lengths + (new - 1)
        feeds["total_sequence_length"][...] = lengths.max() + new


class Bound(Executor):
    """Runs `session` over bindings of the cache, which are made once for a range of slots and kept."""

    session: onnxruntime.InferenceSession
    logits: np.ndarray  # (slots, vocabulary), where every call leaves what it found

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows, new = tokens.shape
        prepared = self.decoding.get((first, rows)) if new == 1 else None
        if prepared is None:
            prepared = self._bind(first, rows, new)
            if new == 1:
                self.decoding[first, rows] = prepared
        step, binding = prepared
        step.fill(tokens, lengths)
        self._run(step, binding)
        return self.logits[:rows]

    @cached_property
    def decoding(self) -> "dict[tuple[int, int], tuple[Step, Any]]":
        """By first slot and rows: the inputs of one new token a row, and their binding."""
        return {}

    def _run(self, step: Step, binding: Any) -> None:
        self.session.run_with_iobinding(binding)

    def _bind(self, first: int, rows: int, new: int) -> "tuple[Step, Any]":
        """The inputs of `new` tokens of each of `rows` slots, bound with the cache and the logits."""
        raise NotImplementedError


class InProcess(Bound):
    """ONNX Runtime in this process, the cache bound in place."""

    def __init__(self, model: Path, geometry: Geometry, session: Session) -> None:
        super().__init__(geometry)
        self.session = open_session(model, session)
        self.inputs = {value.name for value in self.session.get_inputs()}
        self.logits = np.zeros((geometry.slots, geometry.vocabulary), np.float32)

    def _bind(self, first: int, rows: int, new: int) -> tuple[Step, Any]:
        step, binding = Step(rows, new), self.session.io_binding()
        for name, array in step.feeds.items():
            if name in self.inputs:
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, tensor in self.arena.items():
            view = tensor[first : first + rows]
            kind = view.dtype.type
            binding.bind_input(f"past_{name}", "cpu", 0, kind, view.shape, view.ctypes.data)
            binding.bind_output(f"present_{name}", "cpu", 0, kind, view.shape, view.ctypes.data)
        logits = self.logits[:rows]
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        return step, binding


class CrossAttending(InProcess):
    """A decoder that also attends to what an encoder read: keys and values made once a text, shared by its beams.

    They lie in an arena of their own, a place a text; `assign` says which slots attend to which place. A step binds
    them where they are, and moves nothing of them.
    """

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
        self.bound: dict[tuple[int, int, int], tuple[dict[str, np.ndarray], Any]] = {}
        self._allocate(cross)

    def _allocate(self, cross: CrossGeometry) -> None:
        self.cross = cross
        places = self.geometry.slots
        self.cross_arena = {
            f"cross_{kind}_{index}": np.zeros((places, heads, cross.max_length, size), np.float32)
            for index, (heads, size) in enumerate(cross.layers)
            for kind in ("key", "value")
        }
        self.last = np.zeros((places, 1, 2 * sum(heads * size for heads, size in cross.layers)), np.float32)
        self.lengths = np.ones(places, np.int32)  # of the texts
        self.place_of = np.full(places, -1, np.int64)
        self.beam_of = np.zeros(places, np.int64)

    def encode(self, rows: "Sequence[Sequence[int]]") -> "list[list[np.ndarray]]":
        """Keys and values of each text, a tensor a layer and kind: (heads, length, size), in the arena's order."""
        longest = max(map(len, rows))
        ids, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        outputs = self.encoder.run(list(self.cross_arena), {"input_ids": ids, "attention_mask": mask})
        return [[output[row, :, : len(tokens)] for output in outputs] for row, tokens in enumerate(rows)]

    def attach(self, place: int, encoded: "list[np.ndarray]") -> None:
        """Put what `encode` made of one text into a place of the arena."""
        self.lengths[place] = encoded[0].shape[1]
        ends = []
        for tensor, values in zip(self.cross_arena.values(), encoded):
            tensor[place, :, : values.shape[1]] = values
            ends.append(values[:, -1].ravel())
        self.last[place, 0] = np.concatenate(ends)

    def assign(self, slot: int, place: int, beam: int) -> None:
        """Let `slot` attend to `place`, as the `beam`-th of those that do; to none for -1."""
        self.place_of[slot], self.beam_of[slot] = place, beam

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows = len(tokens)
        places, beams = self.place_of[first : first + rows], self.beam_of[first : first + rows]
        used = int(places.max()) + 1
        if (first, rows, used) not in self.bound:
            if len(self.bound) >= MOST_BOUND:
                self.bound.clear()
            self.bound[first, rows, used] = self._bind_cross(first, rows, used)
        feeds, binding = self.bound[first, rows, used]
        feeds["input_ids"][:] = tokens
        feeds["position_ids"][:] = lengths[:, None]
        feeds["seqlens_k"][:] = lengths
        feeds["total_sequence_length"][:] = lengths.max() + 1
        feeds["cross_places"][:] = np.maximum(places, 0) * self.cross.beams + beams
        attending = np.flatnonzero(places >= 0)
        feeds["cross_rows"][:] = 0
        feeds["cross_rows"][places[attending], beams[attending]] = attending
        feeds["cross_seqlens_k"][:] = 0  # a place that nobody attends to costs one key
        feeds["cross_seqlens_k"][places[attending]] = self.lengths[places[attending]] - 1
        feeds["cross_total"][:] = feeds["cross_seqlens_k"].max() + 1
        self.session.run_with_iobinding(binding)
        return self.logits[:rows]

    def _bind_cross(self, first: int, rows: int, used: int) -> "tuple[dict[str, np.ndarray], Any]":
        step, binding = self._bind(first, rows, 1)
        feeds = {
            **step.feeds,
            "cross_rows": np.zeros((used, self.cross.beams), np.int64),
            "cross_places": np.zeros(rows, np.int64),
            "cross_seqlens_k": np.zeros(used, np.int32),
            "cross_total": np.zeros(1, np.int32),
        }
        views = {**{name: feeds[name] for name in feeds if name.startswith("cross_")}, "cross_last": self.last[:used]}
        for name, tensor in self.cross_arena.items():
            view = tensor[:used]
            views[f"past_{name}"] = view
            binding.bind_output(f"present_{name}", "cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
        for name, view in views.items():
            if name in self.inputs:
                binding.bind_input(name, "cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
        return feeds, binding


Infer = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]


class Remote(Executor):
    """The graph behind an `infer` callable; the used part of the cache travels both ways."""

    def __init__(self, infer: Infer, inputs: Sequence[str], geometry: Geometry) -> None:
        super().__init__(geometry)
        self.infer = infer
        self.inputs = set(inputs)

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows, new = tokens.shape
        step = Step(rows, new)
        step.fill(tokens, lengths)
        feeds = {name: array for name, array in step.feeds.items() if name in self.inputs}
        used = int(lengths.max())
        for name, tensor in self.arena.items():
            feeds[f"past_{name}"] = np.ascontiguousarray(tensor[first : first + rows, :, :used])
        outputs = self.infer(feeds)
        for name, tensor in self.arena.items():
            present = outputs[f"present_{name}"]
            for row, length in enumerate(lengths.tolist()):
                tensor[first + row, :, length : length + new] = present[row, :, length : length + new]
        return outputs["logits"]


def other_meaning(metadata: "Mapping[str, str]", version: str) -> "str | None":
    """Why a graph with `metadata` means something else to ONNX Runtime `version`; None where it does not.

    ONNX Runtime 1.24 changed what a window's size counts (microsoft/onnxruntime, pull request 25927): a graph with
    windows says from which version on, or below which, it is to be read.
    """

    def number(text: str) -> "tuple[int, ...]":
        return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())

    least, end = metadata.get("onnxruntime_from", "0"), metadata.get("onnxruntime_below")
    if number(version) >= number(least) and (end is None or number(version) < number(end)):
        return None
    wanted = f"{least} or later" if end is None else f"a version below {end}"
    return f"its attention windows were written for ONNX Runtime {wanted}, and {version} reads them otherwise"


def refuse_other_meaning(session: onnxruntime.InferenceSession) -> None:
    """Raises RuntimeError where this ONNX Runtime reads the graph of `session` otherwise than it was verified."""
    problem = other_meaning(session.get_modelmeta().custom_metadata_map, onnxruntime.__version__)
    if problem is not None:
        raise RuntimeError(
            f"{problem}: install what build-repo's requirements.txt pins for the Python of this Triton release, or "
            "build the model with --triton for the release that is to serve it"
        )


def open_session(model: Path, session: Session) -> onnxruntime.InferenceSession:
    """Open `model` on the CPU."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = session.threads or len(os.sched_getaffinity(0))
    settings.inter_op_num_threads = 1
    for key, value in session.entries.items():
        settings.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(
        str(model), settings, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )
    refuse_other_meaning(session)
    return session
