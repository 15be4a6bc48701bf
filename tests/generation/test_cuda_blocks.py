"""Decoding with the cache in blocks on a stand-in for a device with CUDA's rules (copying_device.py).

It is the same code as on a GPU; ONNX Runtime's PagedAttention runs as equivalent operators of a CPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from builder.building.pipeline import build
from builder.building.verify.emitted import generate
from builder.building.verify.generation import geometry_of
from builder.common.errors import SpecError
from builder.engines import graph_engine
from builder.engines.cuda.blocks import page_attention
from builder.engines.cuda.capacity import MAX_SLOTS
from builder.engines.cuda.decoding import CudaDecoding
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.half_precision import to_half
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.candidates import with_candidates
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.slots import slot_copier
from builder.options import make_spec
from builder.repository.report.record import read_report
from builder.runtime.contract import LayerShape, Session, load_generation
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors import cuda as device_module
from builder.runtime.generation.executors import onnxruntime_cuda_blocks as cuda_blocks
from builder.runtime.generation.executors.base import Executor
from builder.runtime.generation.executors.cuda import ELEMENTS
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.executors.onnxruntime_cuda_blocks import CudaBlocks, block_tokens, feeds_of
from builder.runtime.generation.executors.paged import PagedRows
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.service import make_executor
from tests.decoders import SIZES, make_decoder, make_decoder_checkpoint
from tests.generation.asked import Asked
from tests.generation.copying_device import CopyingDevice
from tests.generation.device_fault import DeviceFault
from tests.generation.test_cuda_executor import answers
from tests.graphs.test_decoders import best_tokens, prompts
from tests.tiny_encoders import VOCABULARY

CUDA = Session(device="cuda")
SMALL = 16  # tokens of a block: the operator's minimum, so that short texts have several


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CopyingDevice:
    device = CopyingDevice()
    monkeypatch.setattr(device_module, "onnxruntime", device)
    monkeypatch.setattr(cuda_blocks, "BLOCKS", {256: SMALL})
    return device


class TinyDecoder:
    """Tiny decoder in fp16: its graph over slots, the same over blocks, and the graph that copies a block."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.model = make_decoder(model_type)
        exported = export_decoder(self.model, folder, 128)
        half = to_half(fuse(exported.graph, folder), folder / "half" / "model.onnx", real=("logits",))
        self.slots = with_candidates(half, folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_blocks, "BLOCKS", {256: SMALL})
            self.blocks = page_attention(self.slots, folder)
        self.copier = slot_copier(exported.caches, ELEMENTS["float16"], half, folder)
        self.geometry = geometry_of(exported.caches, 4, 128, VOCABULARY, "float16")

    def in_slots(self) -> InProcess:
        return InProcess(self.slots.path, self.geometry, Session(threads=1))

    def in_blocks(self, blocks: int | None = None) -> CudaBlocks:
        geometry = replace(self.geometry, blocks=blocks)
        return CudaBlocks(self.blocks.path, self.copier.path, geometry, CUDA)


@pytest.fixture(scope="module")
def llama(module_folder: Callable[[str], Path]) -> TinyDecoder:
    return TinyDecoder("llama", module_folder("llama"))


def answered(executor: Executor, requests: list[Asked], prefill_tokens: int = 24) -> list[list[int]]:
    """Return an engine's answers to `requests`, submitted one step apart."""
    loop = DecodeLoop(executor, SchedulerLimits(0, prefill_tokens))
    for one in requests:
        loop.submit(one.sequences)
        loop.step()
    loop.run_until_idle()
    assert not any(one.errors for one in requests)
    return [one.tokens for one in requests]


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "mistral"])
def test_device_blocks_answer_as_slots(model_type: str, cuda: CopyingDevice, tmp_path: Path) -> None:
    """Fused QKV; capped scores with alternating windows; windows in all layers: texts exceed each window."""
    decoder = TinyDecoder(model_type, tmp_path)
    assert decoder.blocks.operators["PagedAttention"] == SIZES["num_hidden_layers"]
    assert "GroupQueryAttention" not in decoder.blocks.operators
    executor = decoder.in_blocks()
    answers_of_blocks = generate(executor, prompts(), 32)
    assert answers_of_blocks == generate(decoder.in_slots(), prompts(), 32)
    expected = [
        best_tokens(decoder.model, prompt, text) for prompt, text in zip(prompts(), answers_of_blocks, strict=True)
    ]
    same = [
        a == b
        for ours, theirs in zip(answers_of_blocks, expected, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    assert np.mean(same) > 0.9, "fp16 is nearly what transformers says"
    held = sum(tensor.allocation.content.nbytes for tensor in executor.cache.tensors.values())
    layers = [LayerShape(heads, size) for heads, size in decoder.geometry.layers]
    assert held == executor.blocks.num_blocks * graph_engine("cuda").block_bytes(layers, "float16")


def test_device_blocks_answer_a_changing_batch_as_each_row_alone(llama: TinyDecoder, cuda: CopyingDevice) -> None:
    """Calls mix chunks of prompts and steps, requests share prefixes, and some are preempted and resumed."""
    generator = np.random.default_rng(4)
    begin = generator.integers(5, VOCABULARY, 21).tolist()
    texts = [
        [*(begin if number % 2 else []), *generator.integers(5, VOCABULARY, 3 + 5 * number).tolist()]
        for number in range(7)
    ]
    requests = [Asked(text, 24 + 3 * number) for number, text in enumerate(texts)]
    executor = llama.in_blocks(blocks=11)
    cuda.calls.clear()
    loop = DecodeLoop(executor, SchedulerLimits(0, 24))
    for one in requests:
        loop.submit(one.sequences)
        loop.step()
    loop.run_until_idle()
    alone = [answered(llama.in_slots(), [Asked(text, 24 + 3 * number)])[0] for number, text in enumerate(texts)]
    assert [one.tokens for one in requests] == alone
    assert loop.stats.preemptions > 0
    assert loop.stats.reused_tokens > 0
    assert any(rows > 1 and rows < tokens for rows, tokens in cuda.calls), "pieces and steps in one call"


def test_answers_to_one_prompt_share_its_blocks_until_written(llama: TinyDecoder, cuda: CopyingDevice) -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 0.9, "top_k": 20, "random_seed": 5}
    shared: list[list[int]] = []
    expected: list[list[int]] = []
    for executor, texts in ((llama.in_blocks(), shared), (llama.in_slots(), expected)):
        one = Asked(prompts()[0][:20], 12, **options)
        answered(executor, [one])
        texts.extend(sequence.sampler.generated for sequence in one.sequences)
    assert shared == expected
    assert len({tuple(tokens) for tokens in shared}) > 1


def test_device_blocks_return_only_candidates(llama: TinyDecoder, cuda: CopyingDevice) -> None:
    executor = llama.in_blocks()
    cuda.fetched.clear()
    answered(executor, [Asked(prompt, 8) for prompt in prompts()])
    assert (cuda.fetched["top_tokens"] > 0, cuda.fetched["logits"]) == (True, 0)
    answered(executor, [Asked(prompts()[0], 4, repetition_penalty=1.3)])
    assert cuda.fetched["logits"] > 0


def test_paged_attention_matches_its_schema(llama: TinyDecoder) -> None:
    """Compare with the schema of the installed ONNX Runtime, which has no CPU kernel for the operator."""
    (schema,) = (one for one in get_all_operator_schema() if one.name == "PagedAttention")
    node = next(node for node in load_graph(llama.blocks.path).graph.node if node.op_type == "PagedAttention")
    named = [(schema.inputs[place].name, name) for place, name in enumerate(node.input) if name]
    assert [formal for formal, _ in named][-6:] == [
        "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table", "attention_metadata",
    ]  # fmt: skip
    assert [name for _, name in named][-4:] == list(cuda_blocks.TABLES)
    assert {attribute.name for attribute in node.attribute} <= set(schema.attributes)
    assert len(node.output) == len(schema.outputs)


def test_attention_tile_lies_in_one_block() -> None:
    assert [block_tokens([(2, size)]) for size in (8, 64, 72, 128, 136, 256)] == [256, 256, 128, 128, 64, 64]
    assert block_tokens([(8, 256), (8, 64)]) == 256


ROWS = PagedRows([0, 1, 2], [0, 1, 20], [1, 2], [1, 1], [0, 20], [2, 1], [[4], [2, 7]], [0, 1])


def test_paged_feeds_locate_each_row() -> None:
    feeds = feeds_of(ROWS)
    assert feeds["cumulative_sequence_length"].tolist() == [0, 2, 3]
    assert feeds["past_seqlens"].tolist() == [0, 20]
    assert feeds["block_table"].tolist() == [[4, 0], [2, 7]]
    wide = feeds_of(replace(ROWS, tables=[[4], [2, 7, 5]]))["block_table"]
    assert wide.tolist() == [[4, 0, 0, 0], [2, 7, 5, 0]], "a power of two: cuDNN prepares a plan for each width"
    assert feeds["attention_metadata"].tolist() == [2, 21, 21], "the most new tokens, and the most in all, exactly"
    assert {feeds[name].dtype for name in cuda_blocks.TABLES} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[4], [2]], "a table of 1 blocks for 21 tokens"),
        ([[4], [2, 99]], "of 32"),
        ([[7], [2, 7]], "row 0 writes what another row reads"),
    ],
)
def test_stand_in_refuses_invalid_block_tables(
    tables: list[list[int]], message: str, llama: TinyDecoder, cuda: CopyingDevice
) -> None:
    executor = llama.in_blocks()
    executor._infer(ROWS)
    with pytest.raises(DeviceFault, match=message):
        executor._infer(replace(ROWS, tables=tables))


def test_paged_attention_with_other_answers_is_refused(llama: TinyDecoder, tmp_path: Path) -> None:
    model = load_graph(llama.slots.path)
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    node.attribute.append(onnx.helper.make_attribute("smooth_softmax", 1))
    with pytest.raises(SpecError, match="smooth_softmax that ONNX Runtime's PagedAttention does not take"):
        page_attention(save_graph(model, tmp_path / "model.onnx"), tmp_path)


@pytest.fixture(scope="module")
def built(module_folder: Callable[[str], Path]) -> Path:
    folder = module_folder("blocks")
    checkpoint = make_decoder_checkpoint(folder / "checkpoint", "llama")
    options: dict[str, Any] = {"target": "cuda", "precision": "fp16", "slots": 4, "max_length": 128, "quality": 0.9}
    options |= {"cache_gb": 0.00014, "machine": {"gpus": [{"name": "l4"}]}}
    build(make_spec(model=str(checkpoint), name="writes", output=folder / "repository", **options))
    return folder / "repository"


def test_build_verifies_blocks_and_reports_what_has_not_run(built: Path) -> None:
    report, serving = read_report(built, "writes"), load_generation(built / "writes" / "1")
    layers = SIZES["num_hidden_layers"]
    assert report.attention == {"fused": layers, "layers": layers}
    assert any("PagedAttention" in warning and "has not run here" in warning for warning in report.warnings)
    assert (
        serving.arena.blocks == int(0.00014e9 // graph_engine("cuda").block_bytes(serving.arena.layers, "float16")) == 4
    )
    model = onnx.load(str(built / "writes" / "1" / "model.onnx"))
    (cache,) = (value for value in model.graph.input if value.name == "key_cache.0")
    assert [dim.dim_value for dim in cache.type.tensor_type.shape.dim[1:]] == [256, 2, 8]
    assert cache.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16


def test_emitted_model_answers_from_blocks(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = CopyingDevice()
    monkeypatch.setattr(device_module, "onnxruntime", device)
    texts = ["the river", "A long day in the village, and", "the river"]
    folder = Path(shutil.copytree(built / "writes" / "1", tmp_path / "blocks"))
    from_blocks = answers(folder, texts)
    assert device.calls, "it ran on the device"
    checkpoint = str(built.parent / "checkpoint")
    build(make_spec(model=checkpoint, name="writes", output=tmp_path / "r", slots=4, max_length=128))
    assert from_blocks == answers(tmp_path / "r" / "writes" / "1", texts)


def test_largest_call_runs_before_the_first_request(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an arena that grows by what is requested kept a region for each call longer than all before it."""
    device, version = CopyingDevice(), built / "writes" / "1"
    monkeypatch.setattr(device_module, "onnxruntime", device)
    executor = make_executor(version, load_generation(version), None)
    assert isinstance(executor, CudaBlocks)
    assert device.calls == [(4, 4 * 128)], "all slots full, which is less than a piece of prompts"
    assert len(executor.blocks.free_blocks) == executor.blocks.num_blocks
    text = np.arange(5, 12).reshape(1, 7)
    assert np.isfinite(executor.run(0, text, np.zeros(1, np.int64))).all()


@pytest.mark.parametrize(("tokens", "blocks", "call"), [(30, 32, (4, 33)), (150, 32, (4, 152)), (600, 3, (1, 48))])
def test_largest_call_has_the_tokens_there_is_room_for(
    tokens: int, blocks: int, call: tuple[int, int], llama: TinyDecoder, cuda: CopyingDevice
) -> None:
    executor = llama.in_blocks(blocks)
    executor.run_largest(tokens)
    assert (cuda.calls, cuda.fetched["logits"]) == ([call], 1)
    assert len(executor.blocks.free_blocks) == blocks


def test_t4_decodes_from_blocks_by_default_without_bounds(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With bounds its kernel for prompts would gather rows x the longest of them (paged_attention.cc)."""
    options: dict[str, Any] = {"target": "cuda", "precision": "fp16", "max_length": 128, "quality": 0.9}
    options |= {"gpu": {"card": "t4", "memory_limit_mb": 3}}
    build(make_spec(model=str(built.parent / "checkpoint"), name="writes", output=tmp_path / "r", **options))
    version = tmp_path / "r" / "writes" / "1"
    assert (load_generation(version).arena.blocks or 0) > 2
    graph = onnx.load(str(version / "model.onnx")).graph
    assert not {value.name for value in graph.input} & {"attention_metadata", "past_key_0"}
    (node, *_) = (node for node in graph.node if node.op_type == "PagedAttention")
    assert node.input[7:] == ["block_table"], "and nothing after it"
    monkeypatch.setattr(device_module, "onnxruntime", CopyingDevice())
    texts = ["the river", "A long day in the village, and", "the river"]
    t4, l4 = (
        Path(shutil.copytree(one, tmp_path / name)) for name, one in (("t4", version), ("l4", built / "writes/1"))
    )
    assert answers(t4, texts) == answers(l4, texts)


def test_graph_that_cannot_be_paged_is_served_in_slots_by_default(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: the build stopped with "give --slots" though nobody had asked for blocks."""
    fuse_as_before = CudaDecoding.fuse

    def fused(self: CudaDecoding, exported: Graph, folder: Path) -> Graph:
        graph = fuse_as_before(self, exported, folder)
        model = load_graph(graph.path)
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":  # an attribute without effect, for do_rotary is 0
                node.attribute.append(onnx.helper.make_attribute("rotary_interleaved", 1))
        return save_graph(model, folder / "other" / graph.path.name)

    monkeypatch.setattr(CudaDecoding, "fuse", fused)
    options: dict[str, Any] = {"model": str(built.parent / "checkpoint"), "name": "writes", "output": tmp_path / "r"}
    options |= {"target": "cuda", "precision": "fp16", "max_length": 128, "quality": 0.9}
    options |= {"gpu": {"card": "t4", "memory_limit_mb": 3}}
    build(make_spec(**options))
    arena = load_generation(tmp_path / "r" / "writes" / "1").arena
    assert arena.blocks is None
    assert 1 < arena.slots < MAX_SLOTS, "as many as the card has memory for"
    (remark,) = (text for text in read_report(tmp_path / "r", "writes").warnings if "its cache is in slots" in text)
    assert remark.endswith(
        "rotary_interleaved that ONNX Runtime's PagedAttention does not take as GroupQueryAttention does"
    )
    with pytest.raises(SpecError, match="give --slots and no --cache-gb"):
        build(make_spec(**options, cache_gb=0.0002))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "bls"}, "--cache-gb: a cache is made of slots with --executor bls"),
        ({"triton": "24.10"}, "is in ONNX Runtime from 1.31.1 on, and the Python of Triton 24.10 gets 1.23.2"),
        ({"gpu": {}}, r"say which card serves, with --gpu \(one of v100, t4, "),
        ({"serving": {"prefill_tokens": 1025}}, "prefill_tokens is 1025, and over blocks it may be 1024 at most"),
        ({"cache_gb": 1e-5}, "raise --cache-gb, or lower --max-length"),
        ({"cache_gb": 100, "gpu": {"card": "l4"}}, "lower --cache-gb"),
    ],
)
def test_options_without_blocks_are_refused(options: dict[str, Any], message: str, built: Path, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"target": "cuda", "precision": "fp16", "cache_gb": 1, "max_length": 128}
    spec |= {"gpu": {"card": "l4"}, **options}
    with pytest.raises(SpecError, match=message):
        build(make_spec(model=str(built.parent / "checkpoint"), output=tmp_path / "r", **spec))
