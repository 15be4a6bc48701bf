"""Decoders in ONNX Runtime on a GPU: in half precision, their cache too, in process or through BLS.

Weights of fewer bits are multiplied by activations in fp16.

Answers are judged on this machine's CPU, by a graph that rounds as CUDA does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from builder.engines.cuda import provider_options, refuse_head_sizes, refuse_windows
from builder.engines.cuda.lowering import decoder_for_cuda
from builder.engines.cuda.weights import EightBit
from builder.engines.decoding import Lowered
from builder.engines.gpu import refuse_size
from builder.engines.onnxruntime.decoding import Decoding as OnnxRuntime
from builder.errors import SpecError
from builder.export.candidates import with_candidates
from builder.export.slots import FILE as COPIER
from builder.export.slots import choose_rows, slot_copier
from builder.memory import Memory, cache_bytes
from builder.onnx.graph import Graph
from builder.optimise.grids import Grids
from builder.optimise.half_precision import HALVES
from builder.optimise.weights import BITS, quantise_weights
from builder.runtime.contract import CacheType, LayerShape, Session
from builder.runtime.generation.executors.cuda import BYTES, ELEMENTS

ROOM = "cuda"
CACHE_TYPES: Mapping[str, CacheType] = {"fp16": "float16", "bf16": "bfloat16", **dict.fromkeys(BITS, "float16")}
SMALLER = {"fp16": 2, "bf16": 2, "int8-weights": 4, "int4-weights": 8}  # than fp32: the scales of a block come on top


class Decoding(OnnxRuntime):
    timed: ClassVar[bool] = False
    cache_tensor: ClassVar[str] = "TYPE_FP16"

    def refuse(self) -> None:
        super().refuse()
        spec = self.spec
        if spec.precision not in CACHE_TYPES:
            raise SpecError(
                f"CUDA's attention over a cache has {' and '.join(HALVES)}, not {spec.precision}: use --precision "
                f"fp16, or {' or '.join(BITS)} for smaller weights beside activations in fp16"
            )
        if spec.precision in BITS and spec.block_size > EightBit.largest_block:
            raise SpecError(
                f"--block-size {spec.block_size}: CUDA's kernel takes blocks of up to {EightBit.largest_block}"
            )
        if spec.cache != "fp32":
            raise SpecError("on a GPU the cache is in the graph's own precision: leave --cache out")
        if spec.executor == "bls" and self.cache_type != "float16":
            raise SpecError("--executor bls hands the cache to Triton, whose Python has no bf16: use --precision fp16")
        if len(spec.gpu.devices) > 1:
            raise SpecError("a decoder has one cache, on one device: give one of gpu.devices, or use --engine vllm")

    def plan_memory(self, layers: Sequence[LayerShape], weights: int, length: int) -> Memory:
        """Beside the weights as they will be at least, on the card."""
        cache = cache_bytes(layers, self.spec.slots, length, BYTES[self.cache_type])
        refuse_head_sizes({shape.size for shape in layers})
        parts = f"weights and a cache of {self.spec.slots} slots of {length} tokens"
        needs = cache + weights // SMALLER[self.spec.precision]
        refuse_size(self.spec.gpu, needs, parts, "lower --slots or --max-length")
        return Memory(cache, weights)

    @property
    def cache_type(self) -> CacheType:
        return CACHE_TYPES[self.spec.precision]

    @property
    def copier(self) -> str | None:
        return COPIER if self._in_process else None

    def session(self) -> Session:
        gpu = self.spec.gpu
        return Session(device="cuda", device_id=gpu.devices[0], provider_options=provider_options(gpu))

    def rung(self, precision: str) -> str:
        return f"{precision} CUDA"

    def lower(self, fused: Graph, precision: str, folder: Path, grids: Grids | None) -> Lowered:
        refuse_windows(self.spec.gpu.card, fused)
        if precision in HALVES:
            half, judged = decoder_for_cuda(fused, precision, self.spec.triton, folder)
            return Lowered(half, judged)
        small = quantise_weights(fused, precision, self.spec.weight_options, folder, grids, ROOM)
        half, judged = decoder_for_cuda(small.graph, "fp16", self.spec.triton, folder)
        return Lowered(half, judged, quantised=(replace(small, graph=half),))

    def for_release(self, own: Graph, folder: Path) -> tuple[Graph, Graph]:
        """The highest logits leave the GPU alone, where those are enough; through BLS each call says which slots of the
        cache, which stays there, it continues."""
        graph = with_candidates(own, folder)
        return super().for_release(graph if self._in_process else choose_rows(graph, folder), folder)

    def beside(self, graph: Graph, layers: Sequence[LayerShape], folder: Path) -> tuple[Graph, ...]:
        if not self._in_process:
            return ()
        return (slot_copier(layers, ELEMENTS[self.cache_type], graph, folder),)
