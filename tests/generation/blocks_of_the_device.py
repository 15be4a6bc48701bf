"""The rules of ONNX Runtime's PagedAttention for the stand-in device: the inputs that it checks and those it trusts.

Refused: onnxruntime/contrib_ops/cpu/bert/paged_attention_helper.h (shapes, sizes of blocks) and
contrib_ops/cuda/bert/paged_attention.cc ("must be the same buffer"). Trusted, so that errors give wrong numbers:
lengths, the blocks of a table, the bounds in `attention_metadata`, and that no row writes what another reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tests.generation.device_fault import DeviceFault


def refuse_blocks(
    tables: Mapping[str, np.ndarray], shapes: Mapping[str, Sequence[int]], addresses: Mapping[str, int]
) -> None:
    """Raise DeviceFault for invalid blocks. `tables`: int32; `addresses`: addresses of the values on the device."""
    begins, past, table = (tables[name] for name in ("cumulative_sequence_length", "past_seqlens", "block_table"))
    caches = sorted(name for name in shapes if "_cache." in name)
    for name in caches:
        if addresses.get(name) is None or addresses.get(name) != addresses.get(name.replace("_cache.", "_cache_out.")):
            raise DeviceFault(f"{name} and its output must be the same buffer")
    count, size = shapes[caches[0]][:2]
    if size < 16 or size & (size - 1):
        raise DeviceFault(f"block_size must be a power of two and at least 16. Got block_size == {size}")
    rows = len(past)
    if begins.shape != (rows + 1,) or table.ndim != 2 or len(table) != rows:
        raise DeviceFault(f"{rows} rows with lengths of {begins.shape} and a table of {table.shape}")
    new = np.diff(begins)
    if begins[0] or begins[-1] != shapes["input_ids"][1] or (new < 0).any():
        raise DeviceFault(f"rows that begin at {begins.tolist()} of {shapes['input_ids'][1]} tokens")
    total = past + new
    bounds = tables.get("attention_metadata", np.array([new.max(), total.max(), 0]))
    most_new, most, least = bounds.tolist()
    if new.max() > most_new or total.max() > most or total.max() < least:
        raise DeviceFault(f"bounds {[most_new, most, least]} for {new.tolist()} new tokens and {total.tolist()} in all")
    _refuse_memory(table, past.tolist(), total.tolist(), int(count), int(size))


def _refuse_memory(table: np.ndarray, past: Sequence[int], total: Sequence[int], count: int, size: int) -> None:
    places = []
    for row, length in enumerate(total):
        if -(-length // size) > table.shape[1]:
            raise DeviceFault(f"a table of {table.shape[1]} blocks for {length} tokens")
        position = np.arange(length)
        blocks = table[row, position // size]
        if (blocks < 0).any() or (blocks >= count).any():
            raise DeviceFault(f"blocks {blocks.tolist()} of {count}")
        places.append((blocks * size + position % size).tolist())
    for row, own in enumerate(places):
        others = {place for other, held in enumerate(places) if other != row for place in held}
        if others & set(own[past[row] :]):
            raise DeviceFault(f"row {row} writes what another row reads")
