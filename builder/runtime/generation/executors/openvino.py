"""Run a decoder's graph over a paged cache with OpenVINO on the CPU of this process.

The graph is an ONNX file in which attention is PagedAttention, an operator of this project. It is translated to
OpenVINO's PagedAttentionExtension as the file is read, for OpenVINO reads no file of its own with that operator
(2026.4: "unsupported opset: extension"). The inputs of the extension, in order: openvino,
src/core/src/op/paged_attention.cpp. Knows nothing about requests.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import GenerationServing, Session
from ...open_vino import ConversionExtension, openvino
from ...openvino_experts import expert_extensions
from .base import HIDDEN_STATES, CallPart, Geometry
from .openvino_graph import BLOCK, DOMAIN, STATE_TABLE, TABLES
from .openvino_states import state_extensions
from .paged import OPERATOR, Paged, PagedRows

ops = openvino.opset13

# Guessed tokens are attended to as rows of one token: OpenVINO's attention for prompts prepares all keys of a row in
# every call, which with many rows takes up to three times as long (docs/benchmarks/generation.md). In a call of few
# rows it is faster from 5 tokens on, in any call from 9 on.
FEW_ROWS, MAX_SPLIT_TOKENS_OF_FEW, MAX_SPLIT_TOKENS = 2, 4, 8
# Tokens after which a state would be copied to another row of its table: more than any text has.
NO_INTERVAL = 2**30


def open_executor(folder: Path, serving: GenerationServing, geometry: Geometry) -> "OpenVinoExecutor":
    """Open the graph in `folder` that serving.json names."""
    assert serving.model is not None
    return OpenVinoExecutor(folder / serving.model, geometry, serving.session)


class OpenVinoExecutor(Paged):
    """Graph whose attention is PagedAttention; `session.entries` are properties of OpenVINO's CPU plugin."""

    tile_tokens = 64  # measured on an EPYC: docs/benchmarks/generation.md

    def __init__(self, model: Path, geometry: Geometry, session: Session) -> None:
        compiled = compile_paged(model, session)
        self.request = compiled.create_infer_request()
        names = {name for value in compiled.inputs for name in value.get_names()}
        self.inputs = Inputs(self.request, names)
        super().__init__(geometry, BLOCK)
        self.caches = _allocate(compiled, self.request, "_cache.", self.blocks.num_blocks)
        self.states = _allocate(compiled, self.request, STATE_TABLE, geometry.slots)
        self.has_states = bool(self.states)
        self.can_speculate = not self.has_states  # a rejected token cannot be taken out of a state
        sizes = [value.get_partial_shape()[2] for value in compiled.outputs if HIDDEN_STATES in value.get_names()]
        size = sum(size.get_length() for size in sizes)
        self.kept = np.zeros((self.blocks.num_blocks, BLOCK, size), np.float32)  # for a draft, beside the caches

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        super().copy(source, target, length, start)
        for states in self.states:
            states[target] = states[source]

    def _infer(self, rows: PagedRows) -> np.ndarray:
        feeds = feeds_of(rows)
        if self.has_states:
            feeds.update(state_feeds_of(rows))
            self._clear_states(rows)
        self.inputs.fill(feeds)
        logits, *hidden = self.request.infer(share_outputs=True).values()  # otherwise logits are copied once more
        for states in hidden:
            for begin, past, new, table in zip(rows.begins, rows.past, rows.new, rows.tables):
                self.kept[_places(table, past, past + new)] = states[0, begin : begin + new]
        return np.asarray(logits)

    def hidden_states(self, slot: int, start: int, end: int) -> np.ndarray:
        return self.kept[_places(self.blocks.block_tables[slot], start, end)][None]

    def _rows(self, parts: "Sequence[CallPart]") -> PagedRows:
        rows = super()._rows(parts)
        return rows if self.has_states else split_short_rows(rows)

    def _clear_states(self, rows: PagedRows) -> None:
        """Clear the states of rows that start empty."""
        empty = [slot for slot, past in zip(rows.slots, rows.past) if not past]
        if empty:
            for states in self.states:
                states[empty] = 0

    def _copy_block(self, source: int, target: int) -> None:
        for cache in (*self.caches, self.kept):
            cache[target] = cache[source]


def split_short_rows(rows: PagedRows) -> PagedRows:
    """Return `rows` with a row for each token of those with few new ones, such as guessed tokens.

    OpenVINO writes the keys and values of a call before it attends, so that each token finds those before it
    (executor_pa.cpp).
    """
    longest = MAX_SPLIT_TOKENS_OF_FEW if len(rows.new) <= FEW_ROWS else MAX_SPLIT_TOKENS
    if not any(1 < count <= longest for count in rows.new):
        return rows  # an ordinary step copies no tables
    past, new, tables, slots = [], [], [], []
    for before, count, table, slot in zip(rows.past, rows.new, rows.tables, rows.slots):
        size = 1 if count <= longest else count
        for start in range(before, before + count, size):
            past.append(start)
            new.append(size)
            tables.append(table[: -(-(start + size) // BLOCK)])
            slots.append(slot)
    return replace(rows, past=past, new=new, tables=tables, slots=slots)


def _places(table: "Sequence[int]", start: int, end: int) -> "tuple[np.ndarray, np.ndarray]":
    """Return the block, and the place in it, of each position from `start` to before `end`."""
    positions = np.arange(start, end)
    return np.array(table)[positions // BLOCK], positions % BLOCK


class Inputs:
    """Inputs of a request beside the caches, in arrays that it reads in place.

    An input is set anew only if its shape changes: setting one takes ten times as long as filling it.
    """

    def __init__(self, request: openvino.InferRequest, names: "Collection[str]") -> None:
        """Prepare inputs for `request`; `names`: names of the graph's inputs."""
        self.request, self.names = request, names
        self.arrays: "dict[str, np.ndarray]" = {}

    def fill(self, feeds: "Mapping[str, np.ndarray]") -> None:
        """Let the next call read those of `feeds` that the graph has as inputs."""
        for name, values in feeds.items():
            array = self.arrays.get(name)
            if array is not None and array.shape == values.shape:
                array[...] = values
            elif name in self.names:
                self.arrays[name] = values
                self.request.set_tensor(name, openvino.Tensor(values, shared_memory=True))


def feeds_of(rows: PagedRows) -> "dict[str, np.ndarray]":
    """Return the inputs of a call, without the caches."""
    return {
        "input_ids": np.array([rows.tokens], np.int64),
        "position_ids": np.array([rows.positions], np.int64),
        "logits_positions": np.array(rows.logits_positions, np.int64),
        "past_lens": np.array(rows.past, np.int32),
        "subsequence_begins": np.array(rows.begins, np.int32),
        "block_indices": np.array([block for table in rows.tables for block in table], np.int32),
        "block_indices_begins": np.array([0, *accumulate(map(len, rows.tables))], np.int32),
        "max_context_len": np.array(rows.longest, np.int32),
    }


def state_feeds_of(rows: PagedRows) -> "dict[str, np.ndarray]":
    """Return the inputs that let each row read its state in the row of its slot, and write it there."""
    count = len(rows.slots)
    return {
        "state_slots": np.array(rows.slots, np.int32).repeat(2),
        "state_slots_begins": np.arange(0, 2 * count + 1, 2, dtype=np.int32),
        "state_interval": np.full(count, NO_INTERVAL, np.int32),
    }


def _allocate(compiled: Any, request: Any, named: str, rows: int) -> "Sequence[np.ndarray]":
    """Allocate the inputs with `named` in their names, set them in `request`, and return them as arrays (rows, ...)."""
    arrays = []
    for value in compiled.inputs:
        name = next((name for name in value.get_names() if named in name), None)
        if name is not None:
            sizes = [size.get_length() for size in list(value.get_partial_shape())[1:]]
            if name.startswith(("key", "value")) and sizes[1] != BLOCK:
                raise RuntimeError(
                    f"this OpenVINO, {openvino.__version__}, has blocks of {sizes[1]} tokens, and the model is for "
                    f"{BLOCK}: install the version that build-repo's requirements.txt pins"
                )
            tensor = openvino.Tensor(value.get_element_type(), openvino.Shape([rows, *sizes]))
            tensor.data[...] = 0
            request.set_tensor(name, tensor)
            arrays.append(tensor.data)
    return arrays


def compile_paged(model: Path, session: Session) -> openvino.CompiledModel:
    """Open `model` with the threads and properties of `session`."""
    core = openvino.Core()
    core.add_extension([ConversionExtension(OPERATOR, DOMAIN, _translate), *state_extensions(), *expert_extensions()])
    read = core.read_model(str(model))
    for parameter in read.get_parameters():
        if "_cache." in parameter.get_friendly_name():  # the plugin determines its type and layout
            parameter.set_element_type(openvino.Type.dynamic)
            parameter.set_partial_shape(openvino.PartialShape([-1] * 4))
    read.validate_nodes_and_infer_types()
    threads = session.threads or len(os.sched_getaffinity(0))
    return core.compile_model(read, "CPU", {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, **session.entries})


def _translate(node: Any) -> "list[Any]":
    """Translate one PagedAttention.

    Its inputs: query, key and value (1, tokens, heads * size), caches, `TABLES` and, where it has them, slopes and
    sinks, (heads,) each.
    """
    heads, key_heads, size = (int(node.get_attribute(name)) for name in ("num_heads", "kv_num_heads", "head_size"))
    window = int(node.get_attribute("local_window_size")) if node.has_attribute("local_window_size") else 0

    def rows(index: int, count: int) -> Any:
        """Reshape (1, tokens, count * size) as the operator takes it: (tokens, count * size)."""
        return ops.reshape(node.get_input(index), ops.constant(np.array([-1, count * size])), False).output(0)

    def constant(kind: Any, *shape: int) -> Any:
        return ops.constant(np.zeros(shape, kind)).output(0)

    caches = [node.get_input(3), node.get_input(4)]
    past_lens, begins, blocks, block_begins, longest = (node.get_input(5 + index) for index in range(len(TABLES)))
    slopes, sinks = constant(np.float32, 0), constant(np.float32, 0, 0, 0, 0)
    optional = [node.get_input(index) for index in range(10, node.get_input_size())]
    if node.has_attribute("has_sinks"):
        sinks = ops.reshape(optional.pop(), ops.constant(np.array([1, heads, 1, 1])), False).output(0)
    if optional:
        slopes = optional[0]
    inputs = [
        rows(0, heads), rows(1, key_heads), rows(2, key_heads), *caches, past_lens, begins, blocks, block_begins,
        ops.constant(np.float32(node.get_attribute("scale"))).output(0),
        ops.constant(np.int32(window)).output(0),
        slopes, longest,
        constant(np.int32, 0),  # score_aggregation_window
        constant(np.int32, 0), constant(np.int32, 0, 0), constant(np.float32, 0, 0),  # rotation of blocks
        constant(np.float32, 0), constant(np.int32), constant(np.int32),  # xattention
        sinks,
        constant(np.int32), *(constant(np.int32, 0) for _ in range(3)),  # adaptive_rkv
        constant(np.int32, 0),  # token_type_ids
        constant(np.uint8, 0), constant(np.int32, 0),  # qq_bias
    ]  # fmt: skip
    attention = openvino.op._PagedAttentionExtension(inputs)
    facts = attention.get_rt_info()  # the plugin derives the caches' layout from these
    for kind in "kv":
        facts[f"num_{kind}_heads"], facts[f"{kind}_head_size"] = key_heads, size
    shape = ops.constant(np.array([1, -1, heads * size]))
    return [ops.reshape(attention.output(0), shape, False).output(0)]
