"""Decoders in ONNX Runtime on a GPU: in half precision, their cache too, in process or through BLS.

Weights of fewer bits are multiplied by activations in fp16. With --cache-gb sequences share blocks of the cache.

Answers are judged on this machine's CPU, by a graph that rounds as CUDA does and, over blocks, by the loop that is
emitted, its tables and all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from builder.checkpoints.activations import DecodingStep
from builder.checkpoints.grids import StoredWeights
from builder.common.errors import SpecError
from builder.common.memory import BYTES_PER_WEIGHT, ReservedMemory, blocks_that_fit, cache_bytes
from builder.engines import graph_engine
from builder.engines.cuda import (
    provider_options,
    refuse_blocks,
    refuse_head_sizes,
    refuse_wheel,
    refuse_windows,
    why_no_blocks,
    without_kernel,
)
from builder.engines.cuda.blocks import page_attention, why_not_paged
from builder.engines.cuda.capacity import card_of, is_before_flash, is_open, sized
from builder.engines.cuda.eight_bit import CudaEightBit, product_entries
from builder.engines.cuda.on_cpu import on_cpu
from builder.engines.decoding import Executors, Lowered, free_executors
from builder.engines.gpu import refuse_size
from builder.engines.onnxruntime.decoding import OnnxRuntimeDecoding
from builder.engines.optimise.half_precision import HALVES, to_half
from builder.engines.optimise.weights import BITS, quantise_weights
from builder.graphs.onnx.candidates import with_candidates
from builder.graphs.onnx.graph import MODEL_FILE, Graph, check_release, load_whole, operator_needs, save_graph
from builder.graphs.onnx.operators import SHARED_CACHE_NEED
from builder.graphs.onnx.rounding import rounded
from builder.graphs.onnx.slots import FILE as COPIER
from builder.graphs.onnx.slots import choose_rows, slot_copier
from builder.runtime.contract import CacheType, LayerShape, Session
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.cuda import BYTES, ELEMENTS
from builder.runtime.generation.executors.onnxruntime_cuda_blocks import CudaBlocks
from builder.runtime.generation.executors.paged import OPERATOR

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ENGINE = "cuda"
CACHE_TYPES: Mapping[str, CacheType] = {"fp16": "float16", "bf16": "bfloat16", **dict.fromkeys(BITS, "float16")}
JUDGED = (
    "its attention over blocks was judged on this machine's CPU by what ONNX Runtime's PagedAttention means, for that "
    "has a kernel for CUDA alone, which has not run here: compare some answers on the GPU, or give --slots and no "
    "--cache-gb"
)
WEIGHT_REDUCTION = {
    "fp16": 2,
    "bf16": 2,
    "int8-weights": 4,
    "int4-weights": 8,
}  # than fp32: the scales of a block come on top


@dataclass(frozen=True)
class CudaDecoding(OnnxRuntimeDecoding):
    """`in_slots`: why its cache is not in blocks, where that was left to the build.

    `otherwise`: the engine with a cache in slots, where blocks are the default alone. `config`: that of the model.
    """

    in_slots: str | None = None
    otherwise: CudaDecoding | None = None
    config: PreTrainedConfig | None = None

    keeps_states: ClassVar[bool] = False
    takes_adapters: ClassVar[bool] = False
    timed: ClassVar[bool] = False
    maps: ClassVar[bool] = False
    cache_tensor: ClassVar[str] = "TYPE_FP16"

    def refuse(self) -> None:
        super().refuse()
        spec = self.spec
        if spec.precision not in CACHE_TYPES:
            raise SpecError(
                f"CUDA's attention over a cache has {' and '.join(HALVES)}, not {spec.precision}: use --precision "
                f"fp16, or {' or '.join(BITS)} for smaller weights beside activations in fp16"
            )
        block_size = spec.weight_options.block_size
        if spec.precision in BITS and block_size > CudaEightBit.largest_block:
            raise SpecError(
                f"--block-size {block_size}: CUDA's kernel takes blocks of up to {CudaEightBit.largest_block}"
            )
        if spec.cache != "fp32":
            raise SpecError("on a GPU the cache is in the graph's own precision: leave --cache out")
        if spec.executor == "bls" and self.cache_type != "float16":
            raise SpecError("--executor bls hands the cache to Triton, whose Python has no bf16: use --precision fp16")
        if len(spec.gpu.devices) > 1:
            raise SpecError("a decoder has one cache, on one device: give one of gpu.devices, or use --engine vllm")
        if self._in_process and self._card is not None:
            refuse_wheel(self._card, spec.triton)
        if self._in_blocks:
            refuse_blocks(spec, self._card)

    def sized(self, layers: Sequence[LayerShape], weights: int, length: int, config: PreTrainedConfig) -> CudaDecoding:
        refuse_head_sizes({shape.size for shape in layers})
        served = round(weights / 4 * BYTES_PER_WEIGHT[self.spec.precision])
        width, is_default = BYTES[self.cache_type], self._card is not None and is_open(self.spec)
        step = partial(DecodingStep.of, config, self.spec.prefill_tokens, width=width)
        chosen = sized(self.spec, layers, width, served, length, step)
        if is_default and chosen.cache_gb is not None:
            in_slots = sized(self.spec, layers, width, served, length, step, in_blocks=False)
            return CudaDecoding(chosen, otherwise=CudaDecoding(in_slots, config=config), config=config)
        return CudaDecoding(chosen, why_no_blocks(self.spec) if is_default else None, config=config)

    def over(self, fused: Graph) -> CudaDecoding:
        if self.otherwise is None or (reason := why_not_paged(fused)) is None:
            return self
        return replace(self.otherwise, in_slots=reason)

    def plan_memory(self, layers: Sequence[LayerShape], weights: int, length: int) -> ReservedMemory:
        """Plan the card's memory, beside the least that weights and a step will take; with --cache-gb, whole blocks."""
        refuse_head_sizes({shape.size for shape in layers})
        if self.spec.cache_gb is not None:
            engine = graph_engine(ENGINE)
            block, tokens = engine.block_bytes(layers, self.cache_type), engine.block_tokens(layers)
            cache = block * blocks_that_fit(self.spec.cache_gb * 1e9, block, length, tokens)
            parts, lower = "the cache", "--cache-gb"
        else:
            cache = cache_bytes(layers, self.spec.slots, length, BYTES[self.cache_type])
            parts = f"a cache of {self.spec.slots} slots of {length} tokens"
            lower = "--slots or --max-length"
        needs = cache + weights // WEIGHT_REDUCTION[self.spec.precision]
        if self.config is not None:
            step = DecodingStep.of(self.config, self.spec.prefill_tokens, self.spec.slots, BYTES[self.cache_type])
            needs += step.bytes
            parts = f"a step of {step.tokens} tokens and {parts}"
        refuse_size(self.spec.gpu, needs, f"weights, {parts}", f"lower {lower}", self._in_process)
        return ReservedMemory(cache, weights)

    @property
    def attention(self) -> str:
        return OPERATOR if self._in_blocks else super().attention

    def blocks(self, layers: Sequence[LayerShape], memory: ReservedMemory) -> int | None:
        return memory.cache // graph_engine(ENGINE).block_bytes(layers, self.cache_type) if self._in_blocks else None

    @property
    def remarks(self) -> Sequence[str]:
        if self._in_blocks:
            return (JUDGED,)
        return () if self.in_slots is None else (f"its cache is in slots: {self.in_slots}",)

    @property
    def _has_sparse_experts(self) -> bool:
        return False  # CUDA's kernel of the operator has not been compared with PyTorch

    @classmethod
    def opened(cls, graph: Graph, threads: int, mapped: bool) -> Executors:
        """Return executors over blocks, as a CPU has them. Each opens the graph when the one before has been freed."""

        def over(geometry: Geometry) -> CudaBlocks:
            free_executors(graph)
            layers = [LayerShape(heads, size) for heads, size in geometry.layers]
            copier = slot_copier(layers, ELEMENTS[geometry.cache], graph, graph.path.parent)
            return CudaBlocks(graph.path, copier.path, geometry, Session(threads=threads))

        return over

    @property
    def cache_type(self) -> CacheType:
        return CACHE_TYPES[self.spec.precision]

    @property
    def copier(self) -> str | None:
        return COPIER if self._in_process else None

    def session(self) -> Session:
        gpu = self.spec.gpu
        entries = product_entries(self.spec.triton) if self.spec.precision in BITS else {}
        threads = self.spec.threads or 1  # the CPU computes shapes alone, and sampling is numpy's
        return Session(
            device="cuda",
            threads=threads,
            entries=entries,
            device_id=gpu.devices[0],
            provider_options=provider_options(gpu),
        )

    def variant_name(self, precision: str) -> str:
        return f"{precision} CUDA"

    def lower(self, fused: Graph, precision: str, folder: Path, grids: StoredWeights | None) -> Lowered:
        refuse_windows(self.spec.gpu.card, fused)
        if precision in HALVES:
            half, judged = decoder_for_cuda(fused, precision, self.spec.triton, self._in_process, folder)
            return Lowered(half, self._judging(judged, folder))
        small = quantise_weights(fused, precision, self.spec.weight_options, folder, grids, ENGINE)
        half, judged = decoder_for_cuda(small.graph, "fp16", self.spec.triton, self._in_process, folder)
        return Lowered(half, self._judging(judged, folder), quantised=(replace(small, graph=half),))

    def _judging(self, judged: Graph, folder: Path) -> Graph:
        if not self._in_blocks:
            return judged
        return replace(on_cpu(self._paged(judged, folder / "judged"), folder), engine=ENGINE)

    def for_release(self, own: Graph, folder: Path) -> tuple[Graph, Graph]:
        """Return the graphs, from which the highest logits alone leave the GPU, where those are enough.

        Through BLS each call says which slots of the cache, which stays on the GPU, it continues.
        """
        graph = with_candidates(own, folder)
        own, served = super().for_release(graph if self._in_process else choose_rows(graph, folder), folder)
        if not self._in_blocks:
            return own, served
        paged = self._paged(served, folder)
        check_release(paged, self.spec.triton, self._in_process)
        return own, paged

    def replayed(self, own: Graph, served: Graph) -> Graph:
        return own if self._in_blocks else served

    def beside(self, graph: Graph, layers: Sequence[LayerShape], folder: Path) -> tuple[Graph, ...]:
        if not self._in_process:
            return ()
        return (slot_copier(layers, ELEMENTS[self.cache_type], graph, folder),)

    @property
    def _card(self) -> str | None:
        card = card_of(self.spec)
        return None if card is None else card[0]

    def _paged(self, graph: Graph, folder: Path) -> Graph:
        """Return `graph` over blocks; on a card that gathers keys, without bounds, so that no more are gathered."""
        return page_attention(graph, folder, bounded=self._card is None or not is_before_flash(self._card))

    @property
    def _in_blocks(self) -> bool:
        return self.spec.cache_gb is not None


def decoder_for_cuda(fused: Graph, precision: str, triton: str, in_process: bool, folder: Path) -> tuple[Graph, Graph]:
    """Return the graph in `precision`, and the one in fp32 and rounded to it that it is judged by on a CPU.

    Raises SpecError for operators that CUDA lacks.
    """
    needs = operator_needs(fused)
    if "GroupQueryAttention with head_sink" in needs:
        raise SpecError(
            "its attention has sinks, with which ONNX Runtime's CUDA kernel was never compared here; build it for the "
            "CPU, or with --engine vllm"
        )
    if SHARED_CACHE_NEED in needs:
        raise SpecError(
            "its layers share keys and values, with which ONNX Runtime's CUDA kernel was never compared here; build it "
            "for the CPU, or with --engine vllm"
        )
    if "GroupQueryAttention with attention_bias" in needs:
        raise SpecError(
            "its attention adds a bias to scores (ALiBi, or chunks shorter than --max-length), which ONNX Runtime's "
            "CUDA kernel does not have; build it for the CPU, or with --engine vllm"
        )
    in_float = without_kernel(fused.operators, precision, triton, in_process)
    half = to_half(fused, folder / precision / MODEL_FILE, precision, in_float, real=("logits",))
    return half, save_graph(rounded(load_whole(half.path)), folder / "judged" / MODEL_FILE)


DECODING = CudaDecoding
