"""Run the decoder's graph on a GPU with its cache in blocks: ONNX Runtime's own PagedAttention, in this process.

Source of the meaning of its inputs: the schema of com.microsoft PagedAttention in the package of ONNX Runtime 1.31.1,
its kernel for CUDA (paged_attention.cc) and the design document beside it (docs/contrib_ops/cuda/paged_attention.md).
Not tested on a GPU. Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import GenerationServing, Session
from .base import CallPart, Geometry, TokenCandidates
from .cuda import Device, DeviceCache, candidates_of, run_bound
from .onnxruntime import bind_best
from .paged import Paged, PagedRows

# Tokens of a block by the largest head size: those of a tile of FlashAttention, which must lie in one block.
# Source: paged_attention.cc, flash_min_block_size.
BLOCKS = {64: 256, 128: 128, 256: 64}
# Inputs of the graph beside the tokens, int32, by their axes: `attention_metadata` is read on the host, so that the
# kernel need not wait for the lengths, which the others bring to the device.
TABLES: "dict[str, tuple[int | str, ...]]" = {
    "cumulative_sequence_length": ("rows_and_one",),
    "past_seqlens": ("rows",),
    "block_table": ("rows", "most_blocks"),
    "attention_metadata": (3,),
}


def block_tokens(layers: "Sequence[tuple[int, int]]") -> int:
    """Return how many tokens a block of these layers, (heads, head size), has."""
    return max(next(tokens for most, tokens in BLOCKS.items() if size <= most) for _, size in layers)


def open_executor(folder: Path, serving: GenerationServing, geometry: Geometry) -> "CudaBlocks":
    """Open the graphs in `folder` that serving.json names, and run the largest call."""
    assert serving.model is not None
    assert serving.copier is not None
    executor = CudaBlocks(folder / serving.model, folder / serving.copier, geometry, serving.session)
    if serving.prefill_tokens is not None:
        executor.run_largest(serving.prefill_tokens)
    return executor


class CudaBlocks(Paged):
    """Blocks of a cache on a device."""

    can_speculate = True

    def __init__(self, model: Path, copier: Path, geometry: Geometry, options: Session) -> None:
        super().__init__(geometry, block_tokens(geometry.layers))
        device = Device(options)
        self.session = device.open(model)
        self.inputs = {value.name for value in self.session.get_inputs()}
        self.candidates = candidates_of(self.session)
        self.cache = DeviceCache(device, copier, geometry, self.blocks.num_blocks, self.blocks.block_size)
        self.whole, self.highest = self._bound(), self._bound()  # a binding returns all outputs ever bound

    def best(self, parts: "Sequence[CallPart]") -> "list[TokenCandidates]":
        rows = self._rows(parts)
        best = bind_best(self.highest, len(rows.logits_positions), self.candidates)
        self._run(self.highest, rows)
        in_order = best.in_order()
        return [in_order[index] for index in rows.places]

    def run_largest(self, tokens: int) -> None:
        """Run prompts of `tokens` tokens with a token of each other slot, or of as many as there is room for.

        It makes the arena as large as calls without earlier tokens need. One that grows by what is requested
        (kSameAsRequested) keeps a region for each call that is larger than all before it (onnxruntime,
        core/framework/bfc_arena.cc, Extend), and lengths of calls change with every step. A card without memory for
        that fails here, before a request comes.
        """
        blocks, most = self.blocks, self.geometry.max_length
        parts: "list[CallPart]" = []
        room = blocks.num_blocks * blocks.block_size
        for slot in range(self.geometry.slots):
            new = min(max(1, tokens), most, room)
            if new <= 0:
                break
            parts.append(CallPart(slot, np.zeros((1, new), np.int64), np.zeros(1, np.int64), np.array([new - 1])))
            tokens, room = tokens - new, room - blocks.count_for(new) * blocks.block_size
        self.run_together(parts)
        for part in parts:
            blocks.truncate(part.first, 0)

    def _infer(self, rows: PagedRows) -> np.ndarray:
        logits = np.zeros((len(rows.logits_positions), self.geometry.vocabulary), np.float32)
        self.whole.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._run(self.whole, rows)
        return logits

    def _run(self, binding: Any, rows: PagedRows) -> None:
        run_bound(self.session, binding, {name: array for name, array in feeds_of(rows).items() if name in self.inputs})

    def _copy_block(self, source: int, target: int) -> None:
        self.cache.copy(source, target)

    def _bound(self) -> Any:
        """Bind all blocks, which the kernel writes in place: input and output buffers are the same."""
        binding, count, tokens = self.session.io_binding(), self.blocks.num_blocks, self.blocks.block_size
        for name, (heads, _, size) in self.cache.shapes.items():
            region = self.cache.region(name, 0, (count, tokens, heads, size))
            kind, layer = name.split("_")
            binding.bind_input(cache_name(kind, int(layer)), *region)
            binding.bind_output(cache_name(kind, int(layer), "_out"), *region)
        return binding


def cache_name(kind: str, layer: int, after: str = "") -> str:
    """Return the name of the input of a layer's keys or values or, with "_out" for `after`, of the output."""
    return f"{kind}_cache{after}.{layer}"


def feeds_of(rows: PagedRows) -> "dict[str, np.ndarray]":
    """Return the inputs of a call, without the caches. Tables end with block 0, unread.

    Their width is a power of two: cuDNN, which reads them from compute capability 9.0 on, prepares a plan for each
    width (onnxruntime, pull request 32493).
    """
    table = np.zeros((len(rows.tables), 1 << (max(map(len, rows.tables)) - 1).bit_length()), np.int32)
    for row, blocks in enumerate(rows.tables):
        table[row, : len(blocks)] = blocks
    return {
        "input_ids": np.array([rows.tokens], np.int64),
        "position_ids": np.array([rows.positions], np.int64),
        "logits_positions": np.array(rows.logits_positions, np.int64),
        "cumulative_sequence_length": np.array(rows.begins, np.int32),
        "past_seqlens": np.array(rows.past, np.int32),
        "block_table": table,
        "attention_metadata": np.array([max(rows.new), rows.longest, rows.longest], np.int32),
    }
