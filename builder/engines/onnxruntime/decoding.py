"""Decoders in ONNX Runtime on the CPU: GroupQueryAttention over a cache in place, in process or through BLS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from builder.checkpoints.grids import StoredWeights
from builder.common.errors import SpecError
from builder.common.memory import ReservedMemory, cache_bytes, conversion_bytes, refuse_slots, state_bytes
from builder.common.releases import runtime_has, runtime_of
from builder.engines.decoding import DecodingEngine, Executors, Lowered
from builder.engines.onnxruntime import MAPPED, loop_session, resting
from builder.engines.onnxruntime.older import for_runtime
from builder.engines.optimise.cache_precision import quantise_cache
from builder.engines.optimise.fusion import fuse
from builder.graphs.onnx.experts import run_all_experts
from builder.graphs.onnx.graph import Graph, check_release
from builder.graphs.onnx.likeliest import finding_likeliest
from builder.graphs.onnx.operators import CACHED_ATTENTION, EXPERTS_NEED, QUANTISED_EXPERTS_NEED
from builder.runtime.contract import CacheType, LayerShape, Session
from builder.runtime.fields import Field
from builder.runtime.generation.executors.base import HIDDEN_STATES
from builder.runtime.generation.executors.onnxruntime import InPlace
from builder.runtime.generation.executors.onnxruntime_hidden_states import HiddenStatesDraft
from builder.runtime.sessions import open_session

# Inputs of a step, other than its caches: builder/graphs/export/decoder.py and, the last three,
# builder/graphs/onnx/slots.py.
INPUTS = {
    "input_ids": ("TYPE_INT64", (-1, -1)),
    "position_ids": ("TYPE_INT64", (-1, -1)),
    "seqlens_k": ("TYPE_INT32", (-1,)),
    "total_sequence_length": ("TYPE_INT32", (1,)),
    "logits_positions": ("TYPE_INT64", (-1,)),
    "cache_rows": ("TYPE_INT64", (-1,)),
    "cache_slots": ("TYPE_INT64", (-1,)),
    "new_cache_length": ("TYPE_INT64", (1,)),
}
HEAD_MULTIPLE = 8
CACHE_TYPES: Mapping[str, CacheType] = {"fp32": "float32", "int8": "int8"}


class OnnxRuntimeDecoding(DecodingEngine):
    keeps_states: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True
    maps: ClassVar[bool] = True
    cache_tensor: ClassVar[str] = "TYPE_FP32"  # keys and values, between Triton models

    @property
    def attention(self) -> str:
        return CACHED_ATTENTION

    def refuse(self) -> None:
        if self.spec.cache_gb is not None and self.spec.target == "cpu":
            raise SpecError("--cache-gb is for --engine openvino, or a GPU, where sequences share a cache; use --slots")
        if self.spec.cache == "fp16" and self.spec.target == "cpu":
            raise SpecError("ONNX Runtime's cache on a CPU is fp32 or int8: --cache fp16 is for --engine openvino")

    def _refuse_states(self, layers: Sequence[LayerShape], decaying_by_key: bool) -> None:
        if not self.keeps_states:
            super()._refuse_states(layers, decaying_by_key)
        if not self._in_process:
            raise SpecError(
                "its layers keep a state beside keys and values, which stays in the process of the decode loop: leave "
                "--executor bls out"
            )

    def plan_memory(self, layers: Sequence[LayerShape], weights: int, length: int) -> ReservedMemory:
        """Plan a slot of `length` tokens for each of --slots sequences.

        Raises SpecError for heads that have no kernel.
        """
        refuse_head_sizes(layers, "build it with --engine openvino")
        cache = cache_bytes(layers, self.spec.slots, length, np.dtype(self.cache_type).itemsize)
        cache += self.spec.slots * state_bytes(layers)
        slots = f"{self.spec.slots} slots of {length} tokens"
        refuse_slots(cache, self.spec.usable_memory, "the cache needs", slots, "--slots or --max-length")
        return ReservedMemory(cache, weights, conversion=conversion_bytes(layers, self.cache_type, length))

    def fuse(self, exported: Graph, folder: Path) -> Graph:
        """Fuse the graph; where the loop runs it on a CPU, it also computes the outputs that beam search reads."""
        if not self._has_sparse_experts:
            exported = run_all_experts(exported, folder)
        graph = fuse(exported, folder)
        if self.spec.in_process and self.spec.beams != 1:
            graph = finding_likeliest(graph)
        check_release(graph, self.spec.triton, self._in_process)
        return graph

    def lower(self, fused: Graph, precision: str, folder: Path, grids: StoredWeights | None) -> Lowered:
        if not runtime_has(QUANTISED_EXPERTS_NEED, self.spec.triton, self._in_process):
            fused = run_all_experts(fused, folder)
        return super().lower(fused, precision, folder, grids)

    @property
    def cache_type(self) -> CacheType:
        return CACHE_TYPES[self.spec.cache]

    def session(self) -> Session:
        """Return the session of the loop: with a draft, threads rest after each call.

        The threads of the two models work on the same cores by turns, so that none spins while the other works.
        """
        looped = loop_session(self.spec.loop_threads, self.spec.serving.spinning)
        return looped if self.spec.draft is None else resting(looped)

    @staticmethod
    def session_here(cache: CacheType, threads: int) -> Session:
        return Session(threads=threads)

    @classmethod
    def opened(cls, graph: Graph, threads: int, mapped: bool) -> Executors:
        session = open_session(graph.path, Session(threads=threads, entries=MAPPED if mapped else {}))
        executor = HiddenStatesDraft if HIDDEN_STATES in graph.inputs else InPlace
        return lambda geometry: executor(geometry, session)

    def shrink_cache(self, graph: Graph, largest: Callable[[], Mapping[str, np.ndarray]], folder: Path) -> Graph:
        return quantise_cache(graph, largest(), folder)

    def for_release(self, own: Graph, folder: Path) -> tuple[Graph, Graph]:
        """Return the graphs: the window of attention means another number in older releases."""
        graph = for_runtime(own, runtime_of(self.spec.triton, self._in_process), folder)
        check_release(graph, self.spec.triton, self._in_process)
        return own, graph

    def step_fields(self, graph: Graph, layers: Sequence[LayerShape]) -> Sequence[Field]:
        return [] if self._in_process else [_field(name, layers, self.cache_tensor) for name in graph.inputs]

    @property
    def _has_sparse_experts(self) -> bool:
        """True if the ONNX Runtime that serves has the operator that reads the chosen experts alone."""
        return runtime_has(EXPERTS_NEED, self.spec.triton, self._in_process)

    @property
    def _in_process(self) -> bool:
        return self.spec.executor == "in-process"


def refuse_head_sizes(layers: Sequence[LayerShape], instead: str) -> None:
    """Raise SpecError if attention over a cache does not take the heads of a layer; `instead`: what to do.

    Source: onnxruntime/contrib_ops/cpu/bert/group_query_attention_helper.h, "head_size must be a multiple of 8".
    """
    wrong = sorted({layer.size for layer in layers if layer.size % HEAD_MULTIPLE})
    if wrong:
        raise SpecError(
            f"its heads have {wrong[0]} numbers, and ONNX Runtime's attention over a cache ({CACHED_ATTENTION}) takes "
            f"multiples of {HEAD_MULTIPLE}; {instead}"
        )


def _field(name: str, layers: Sequence[LayerShape], cache_tensor: str) -> Field:
    if not name.startswith("past_"):
        return Field(name, *INPUTS[name])
    layer = layers[int(name.rsplit("_", 1)[1])]
    return Field(name, cache_tensor, (-1, layer.heads, -1, layer.size))


DECODING = OnnxRuntimeDecoding
