"""Decoders in OpenVINO on the CPU: attention over blocks that all sequences share, in process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from builder.common.errors import SpecError
from builder.common.memory import ADVICE, ReservedMemory, blocks_that_fit
from builder.engines import graph_engine
from builder.engines.decoding import DecodingEngine, Executors, free_executors
from builder.engines.openvino import BACKEND, decoder_properties
from builder.engines.openvino.lowering import page_attention
from builder.graphs.onnx.graph import Graph
from builder.runtime.contract import CacheType, LayerShape, Session
from builder.runtime.generation.executors.base import HIDDEN_STATES, Geometry
from builder.runtime.generation.executors.openvino_graph import BLOCK
from builder.runtime.generation.executors.paged import OPERATOR

if TYPE_CHECKING:
    from builder.runtime.generation.executors.openvino import OpenVinoExecutor

CACHE_TYPES: Mapping[str, CacheType] = {"fp32": "float32", "fp16": "float16", "int8": "uint8"}


class OpenVinoDecoding(DecodingEngine):
    paged: ClassVar[bool] = True
    keeps_states: ClassVar[bool] = True

    @property
    def attention(self) -> str:
        return OPERATOR

    def refuse(self) -> None:
        if self.spec.executor == "bls":
            raise SpecError("--executor bls is not for decoders with --engine openvino, which run in process")

    def _refuse_states(self, layers: Sequence[LayerShape], decaying_by_key: bool) -> None:
        if not any(layer.heads for layer in layers):
            raise SpecError(
                "none of its layers keeps keys and values, of which the blocks of OpenVINO's cache consist; use "
                "--engine onnxruntime"
            )
        if decaying_by_key:
            raise SpecError(
                "its layers keep a state in which each number of the keys decays at its own rate, which OpenVINO's "
                "operators do not do; use --engine onnxruntime"
            )

    def plan_memory(self, layers: Sequence[LayerShape], weights: int, length: int) -> ReservedMemory:
        """Plan the states of --slots sequences, and whole blocks.

        These are as many as fit into the rest of --cache-gb, or as --slots full texts need in half of the memory.
        """
        usable, requested = self.spec.usable_memory, self.spec.cache_gb
        block, states = graph_engine(BACKEND).block_bytes(layers, self.cache_type), self._states(layers)
        full = self.spec.slots * -(-length // BLOCK) * block + states
        size = min(full, usable / 2) if requested is None else requested * 1e9
        if states and size <= states:
            raise SpecError(
                f"the states of {self.spec.slots} slots take {states / 1e9:.3g} GB of a cache of {size / 1e9:.3g} GB: "
                "raise --cache-gb, or lower --slots"
            )
        blocks = blocks_that_fit(size - states, block, length, BLOCK)
        if size > usable:
            raise SpecError(
                f"the cache takes {size / 1e9:.1f} GB and {usable / 1e9:.1f} GB may be used; lower --cache-gb, {ADVICE}"
            )
        return ReservedMemory(blocks * block + states, weights)

    def fuse(self, exported: Graph, folder: Path) -> Graph:
        """Return the graph over a paged cache; OpenVINO has fusions of its own."""
        return page_attention(exported, folder)

    @property
    def cache_type(self) -> CacheType:
        return CACHE_TYPES[self.spec.cache]

    def blocks(self, layers: Sequence[LayerShape], memory: ReservedMemory) -> int:
        block = graph_engine(BACKEND).block_bytes(layers, self.cache_type)
        return (memory.cache - self._states(layers)) // block

    def _states(self, layers: Sequence[LayerShape]) -> int:
        return self.spec.slots * graph_engine(BACKEND).state_bytes(layers)

    def cached_tokens(self, layers: Sequence[LayerShape], memory: ReservedMemory, length: int) -> int:
        return self.blocks(layers, memory) * BLOCK

    def session(self) -> Session:
        return self.session_here(self.cache_type, self.spec.loop_threads)

    @staticmethod
    def session_here(cache: CacheType, threads: int) -> Session:
        return Session(engine=BACKEND, threads=threads, entries=decoder_properties(cache))

    @classmethod
    def opened(cls, graph: Graph, threads: int, mapped: bool) -> Executors:
        """Return executors. Each compiles the graph for the type of the cache, when the one before has been freed."""

        def compiled(geometry: Geometry) -> OpenVinoExecutor:
            # which import OpenVINO
            from builder.runtime.generation.executors.openvino import OpenVinoExecutor
            from builder.runtime.generation.executors.openvino_hidden_states import HiddenStatesDraft

            free_executors(graph)
            executor = HiddenStatesDraft if HIDDEN_STATES in graph.inputs else OpenVinoExecutor
            return executor(graph.path, geometry, cls.session_here(geometry.cache, threads))

        return compiled


DECODING = OpenVinoDecoding
