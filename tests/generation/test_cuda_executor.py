"""Decoding with the cache on a stand-in for a device with CUDA's rules about memory (copying_device.py).

The same code runs here, fp16 cache and all; tests/gpu runs it on a GPU if there is one.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from builder.building.pipeline import build
from builder.building.verify.emitted import generate
from builder.building.verify.generation import geometry_of, make_reference, measure
from builder.cli import main
from builder.common.errors import SpecError
from builder.engines.cuda.decoding import ENGINE, decoder_for_cuda
from builder.engines.decoding import opened
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.half_precision import to_half
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.candidates import with_candidates
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.slots import slot_copier
from builder.options import WeightOptions, make_spec
from builder.runtime.contract import FILE, Session, dump, load_generation
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors import cuda as device_module
from builder.runtime.generation.executors.base import MAX_CANDIDATES, CallPart, Executor, Geometry, TokenCandidates
from builder.runtime.generation.executors.cuda import ELEMENTS, DeviceCache, copy_to_host
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.executors.onnxruntime_cuda import Cuda
from builder.runtime.generation.executors.padded_prefill import bucket, padded
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.sampling import Sampler
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.service import Service
from tests.decoders import make_decoder, make_decoder_checkpoint
from tests.generation.asked import Asked
from tests.generation.copying_device import CopyingDevice
from tests.generation.device_fault import DeviceFault
from tests.graphs.test_decoders import prompts
from tests.tiny_encoders import VOCABULARY

CUDA = Session(device="cuda")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CopyingDevice:
    device = CopyingDevice()
    monkeypatch.setattr(device_module, "onnxruntime", device)
    return device


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_device_cache_answers_as_a_cache_in_place(model_type: str, cuda: CopyingDevice, tmp_path: Path) -> None:
    exported = export_decoder(make_decoder(model_type), tmp_path, 128)
    fused = fuse(exported.graph, tmp_path)
    half = to_half(fused, tmp_path / "half" / "model.onnx", real=("logits",))
    copier = slot_copier(exported.caches, ELEMENTS["float16"], half, tmp_path)
    geometry = geometry_of(exported.caches, 4, 128, VOCABULARY, "float16")
    in_place = generate(InProcess(half.path, geometry, Session(threads=1)), prompts(), 32)
    assert generate(Cuda(half.path, copier.path, geometry, CUDA), prompts(), 32) == in_place
    cuda.calls.clear()
    assert generate(Cuda(half.path, copier.path, geometry, CUDA), prompts(), 32, prefill_tokens=256) == in_place
    assert next(call for call in cuda.calls if call[1] > 1) == (3, 64), "three prompts begin in one call, padded"
    exact = generate(
        InProcess(fused.path, geometry_of(exported.caches, 4, 128, VOCABULARY), Session(threads=1)), prompts(), 32
    )
    same = np.mean(
        [a == b for ours, theirs in zip(in_place, exact, strict=True) for a, b in zip(ours, theirs, strict=True)]
    )
    assert same > 0.9, "fp16 is nearly fp32"


def test_prompts_reach_the_device_in_few_lengths(cuda: CopyingDevice, tmp_path: Path) -> None:
    """Regression: an arena that grows by what is requested kept a region for every length of a prompt."""
    exported = export_decoder(make_decoder("llama"), tmp_path, 128)
    half = to_half(fuse(exported.graph, tmp_path), tmp_path / "half" / "model.onnx", real=("logits",))
    copier = slot_copier(exported.caches, ELEMENTS["float16"], half, tmp_path)
    geometry = geometry_of(exported.caches, 4, 128, VOCABULARY, "float16")
    texts = [list(range(5, 5 + length)) for length in (3, 17, 30, 41, 77, 120)]
    in_place = generate(InProcess(half.path, geometry, Session(threads=1)), texts, 4)
    for prefill_tokens in (50, 256):  # in pieces, which begin after a past, and several texts in a call
        cuda.calls.clear()
        executor = Cuda(half.path, copier.path, geometry, CUDA)
        assert generate(executor, texts, 4, prefill_tokens=prefill_tokens) == in_place
        ends_of_slots = {new for _, new in cuda.calls} - {1, 16, 32, 64, 128}
        assert len(ends_of_slots) <= 2


def test_padding_ends_with_the_slot() -> None:
    row = CallPart(2, np.arange(40)[None], np.array([100]))
    part, counts = padded([row], 150)
    assert (part.tokens.shape, part.lengths.tolist(), counts) == ((1, 50), [100], None)
    assert part.logits_indices.tolist() == [39]
    assert padded([CallPart(0, np.ones((3, 1)), np.array([4, 5, 6]))], 150)[0].tokens.shape == (3, 1), "decoding"
    assert [bucket(tokens, 1000) for tokens in (1, 16, 17, 512, 513)] == [16, 16, 32, 512, 1000]


@pytest.mark.parametrize(("slow", "ranges"), [("copy", True), ("copy_range", False)])
def test_slots_are_copied_by_what_takes_less_time_on_the_device(
    slow: str, ranges: bool, half: tuple[Graph, Graph, Geometry], cuda: CopyingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []

    def slowed(name: str) -> Callable[..., None]:
        true = getattr(DeviceCache, name)

        def call(cache: DeviceCache, *places: int) -> None:
            copied.append(name)
            time.sleep(0.02 if name == slow else 0)
            true(cache, *places)

        return call

    for name in ("copy", "copy_range"):
        monkeypatch.setattr(DeviceCache, name, slowed(name))
    graph, copier, geometry = half
    executor = Cuda(graph.path, copier.path, geometry, CUDA)
    assert (executor.longest_range > geometry.max_length / 2) is ranges
    executor.cache.tensors["key_0"].allocation.content[:] = np.arange(
        executor.cache.tensors["key_0"].allocation.content.size
    )
    copied.clear()
    executor.copy(0, 2, 9, 4)
    assert copied == ["copy_range" if ranges else "copy"]
    heads, tokens, size = executor.cache.shapes["key_0"]
    keys = executor.cache.tensors["key_0"].allocation.content.view(np.uint16).reshape(-1, heads, tokens, size)
    assert (keys[2, :, 4:9] == keys[0, :, 4:9]).all()


@pytest.mark.parametrize(("model_type", "precision"), [("gpt2", "int4-weights"), ("llama", "int8-weights")])
def test_quantised_weights_multiply_fp16_activations(
    model_type: str, precision: str, cuda: CopyingDevice, tmp_path: Path
) -> None:
    """Every product has an operator and layout with a CUDA kernel; tied embeddings are stored once."""
    model = make_decoder(model_type)
    exported = export_decoder(model, tmp_path, 128)
    quantised = quantise_weights(
        fuse(exported.graph, tmp_path), precision, WeightOptions(16, True), tmp_path, products_of=ENGINE
    )
    half, _ = decoder_for_cuda(quantised.graph, "fp16", "26.06", True, tmp_path)
    assert half.operators["MatMulNBits"] == quantised.matmuls == 9
    assert half.operators["MatMul"] == half.operators["Gemm"] == 0
    graph = onnx.load(str(half.path)).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            assert attributes.get("accuracy_level", 0) == 0, "the CPU must not round what CUDA does not"
            assert tensors[node.input[2]].data_type == onnx.TensorProto.FLOAT16
    tables = [tensor for tensor in tensors.values() if VOCABULARY in tensor.dims and len(tensor.dims) == 3]
    assert len(tables) == (1 if model_type == "gpt2" else 2)
    copier = slot_copier(exported.caches, ELEMENTS["float16"], half, tmp_path)
    geometry = geometry_of(exported.caches, 4, 128, VOCABULARY, "float16")
    in_place = generate(InProcess(half.path, geometry, Session(threads=1)), prompts(), 16)
    assert generate(Cuda(half.path, copier.path, geometry, CUDA), prompts(), 16) == in_place
    agreement = measure(opened(half, 1), exported.caches, VOCABULARY, make_reference(model, prompts()), "float16")
    assert agreement.mean > (0.3 if precision == "int4-weights" else 0.85)  # random weights: nearly flat logits


@pytest.fixture(scope="module")
def half(module_folder: Callable[[str], Path]) -> tuple[Graph, Graph, Geometry]:
    """Return a decoder in fp16 with its candidates, the graph that copies its slots, and its arena."""
    folder = module_folder("half")
    exported = export_decoder(make_decoder("llama"), folder, 128)
    graph = with_candidates(to_half(exported.graph, folder / "half" / "model.onnx", real=("logits",)), folder)
    copier = slot_copier(exported.caches, ELEMENTS["float16"], graph, folder)
    return graph, copier, geometry_of(exported.caches, 4, 128, VOCABULARY, "float16")


def generated(executor: Executor, options: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of two requests that run together; the second continues alone and speculates."""
    requests = [Asked(prompt, count, **options) for prompt, count in zip(prompts(), (12, 40), strict=False)]
    loop = DecodeLoop(executor, SchedulerLimits(0, 128))
    for one in requests:
        loop.submit(one.sequences)
    loop.run_until_idle()
    assert not any(one.errors for one in requests)
    return [one.tokens for one in requests]


SAMPLED: dict[str, Any] = {"temperature": 0.8, "random_seed": 3}


@pytest.mark.parametrize(
    ("options", "enough"),
    [
        ({}, True),
        ({**SAMPLED, "top_k": 8, "top_p": 0.9, "typical_p": 0.9}, True),
        ({**SAMPLED, "top_k": MAX_CANDIDATES + 1}, False),
        ({**SAMPLED, "top_p": 0.9}, False),
        ({"logit_bias": {7: 3.0}}, False),
        ({"repetition_penalty": 1.3}, False),
        ({"logprobs": 2}, False),
    ],
)
def test_device_returns_candidates_only_where_these_are_enough(
    options: dict[str, Any], enough: bool, half: tuple[Graph, Graph, Geometry], cuda: CopyingDevice
) -> None:
    graph, copier, geometry = half
    on_device = Cuda(graph.path, copier.path, geometry, CUDA)
    assert on_device.candidates == MAX_CANDIDATES < VOCABULARY
    cuda.fetched.clear()
    answers = generated(on_device, options)
    assert (cuda.fetched["top_tokens"] > 0, cuda.fetched["logits"] > 0) == (enough, not enough)
    assert answers == generated(InProcess(graph.path, geometry, Session(threads=1)), options)


def test_stand_in_refuses_several_tokens_of_rows_with_a_past(
    half: tuple[Graph, Graph, Geometry], cuda: CopyingDevice
) -> None:
    graph, copier, geometry = half
    on_device = Cuda(graph.path, copier.path, geometry, CUDA)
    with pytest.raises(DeviceFault, match="batch_size must be 1"):
        on_device.run(0, np.full((2, 3), 7), np.array([3, 3]))


def test_candidates_with_equal_logits_are_ordered_by_token() -> None:
    ordered = TokenCandidates(np.array([[9, 4, 6, 2]]), np.array([[3.0, 1.0, 1.0, 1.0]], np.float32)).in_order()
    assert (ordered.tokens.tolist(), ordered.logits.tolist()) == ([[9, 2, 4, 6]], [[3, 1, 1, 1]])


def test_option_that_needs_all_logits_gets_them() -> None:
    sampler = Sampler(Rules(RequestOptions(temperature=0.0, min_tokens=2), ends=(3,), last=(3,), max_tokens=5))
    assert [sampler.needs_only_top(8, 1) for sampler.generated in ([], [5] * 2, [5] * 3, [5] * 4)] == [0, 1, 1, 0]
    sampler.generated = [5] * 3
    assert not sampler.needs_only_top(8, 2), "the second of two is forced"


def contents(executor: Cuda) -> dict[str, np.ndarray]:
    """Return a copy of each tensor of the cache, (slots, heads, tokens, size)."""
    shapes = executor.cache.shapes
    return {name: tensor.numpy().reshape(-1, *shapes[name]) for name, tensor in executor.cache.tensors.items()}


def test_copied_slot_continues_like_its_source_alone(cuda: CopyingDevice, tmp_path: Path) -> None:
    exported = export_decoder(make_decoder("llama"), tmp_path, 32)
    half = to_half(exported.graph, tmp_path / "half" / "model.onnx", real=("logits",))
    copier = slot_copier(exported.caches, ELEMENTS["float16"], half, tmp_path)
    executor = Cuda(half.path, copier.path, geometry_of(exported.caches, 3, 32, VOCABULARY, "float16"), CUDA)
    assert all(not np.any(tensor) for tensor in contents(executor).values()), "a new cache is empty"
    assert cuda.copied_to_device < 1024, "its zeros are not sent: buffers for them would stay in the arena"
    executor.run(0, np.array([[5, 6, 7]]), np.array([0]))
    before = contents(executor)
    executor.copy(0, 2, 3)
    for name, tensor in contents(executor).items():
        np.testing.assert_array_equal(tensor[2], before[name][0])
        np.testing.assert_array_equal(tensor[:2], before[name][:2])
    source = executor.run(0, np.array([[8]]), np.array([3])).copy()
    np.testing.assert_allclose(executor.run(2, np.array([[8]]), np.array([3])), source, atol=1e-3)


def test_cache_that_its_kernel_cannot_create_is_refused(
    cuda: CopyingDevice, half: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, copier, geometry = half
    monkeypatch.setattr(device_module, "MAX_NUMBERS", 4096)
    with pytest.raises(RuntimeError, match="takes 4096: build with fewer --slots"):
        Cuda(graph.path, copier.path, geometry, CUDA)


def test_slot_is_copied_from_a_position_to_another_alone(cuda: CopyingDevice, half: Any) -> None:
    """Regression: a shared beginning of a few tokens moved a whole slot, 8.6 GB at 32k tokens."""
    graph, copier, geometry = half
    executor = Cuda(graph.path, copier.path, geometry, CUDA)
    for slot, tokens in enumerate(([5, 6, 7, 8, 9], [9, 8, 7, 6, 5], [4, 4, 4, 4, 4])):
        executor.run(slot, np.array([tokens]), np.array([0]))
    before = contents(executor)
    executor.longest_range = geometry.max_length  # as if it took less time here
    executor.copy(0, 2, 4, start=1)
    for name, tensor in contents(executor).items():
        expected = before[name].copy()
        expected[2, :, 1:4] = expected[0, :, 1:4]
        np.testing.assert_array_equal(tensor, expected)
    executor.copy(1, 2, 3, start=3)


def test_stand_in_refuses_what_cuda_answers_wrongly(cuda: CopyingDevice, tmp_path: Path) -> None:
    graph = export_decoder(make_decoder("gpt2"), tmp_path, 16).graph
    with pytest.raises(DeviceFault, match="preload_dlls comes before the first session"):
        cuda.InferenceSession(str(graph.path), None, [("CUDAExecutionProvider", {"device_id": "0"})])
    cuda.preload_dlls()
    value = cuda.allocate(24)
    assert np.isnan(value.content.view(np.float32)).all(), "new memory holds anything"
    session = cuda.InferenceSession(str(graph.path), None, [("CUDAExecutionProvider", {"device_id": "0"})])
    binding = session.io_binding()
    host = np.zeros((1, 4), np.int64)
    with pytest.raises(DeviceFault, match="illegal address"):
        binding.bind_input("input_ids", "cuda", 0, np.int64, host.shape, host.ctypes.data)
    with pytest.raises(DeviceFault, match="the host cannot read it"):
        binding.bind_input("input_ids", "cpu", 0, np.int64, host.shape, value.address)
    with pytest.raises(DeviceFault, match=r"input_ids is tensor\(int64\), and tensor\(int32\) is bound"):
        binding.bind_input("input_ids", "cpu", 0, np.int32, host.shape, host.ctypes.data)
    with pytest.raises(DeviceFault, match="illegal address"):
        binding.bind_input("input_ids", "cuda", 0, np.int64, (1, 4), value.address)
    binding.bind_input("input_ids", "cpu", 0, np.int64, host.shape, host.ctypes.data)
    with pytest.raises(DeviceFault, match=r"Missing Input: .*past_key_0"):
        session.run_with_iobinding(binding)


@pytest.fixture(scope="module")
def built(module_folder: Callable[[str], Path]) -> Path:
    folder = module_folder("cuda")
    checkpoint = make_decoder_checkpoint(folder / "checkpoint", "llama")
    options: dict[str, Any] = {"target": "cuda", "precision": "fp16", "slots": 4, "max_length": 128, "quality": 0.9}
    gpu = {"devices": [1], "memory_limit_mb": 4096}
    build(make_spec(model=str(checkpoint), name="writes", output=folder / "repository", gpu=gpu, **options))
    return folder / "repository"


def test_emitted_model_has_its_gpu_and_a_half_precision_cache(built: Path) -> None:
    serving = load_generation(built / "writes" / "1")
    assert (serving.executor, serving.arena.dtype) == ("in-process", "float16")
    assert (serving.session.device, serving.session.device_id) == ("cuda", 1)
    assert serving.session.provider_options["gpu_mem_limit"] == str(4096 << 20)
    config = (built / "writes" / "config.pbtxt").read_text()
    assert "kind: KIND_GPU" in config
    assert "gpus: [ 1 ]" in config
    model = onnx.load(str(built / "writes" / "1" / "model.onnx"))
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    assert types["past_key_0"] == types["present_value_1"] == onnx.TensorProto.FLOAT16
    assert types["logits"] == onnx.TensorProto.FLOAT, "sampling is done in fp32"


def test_emitted_gpu_model_answers_as_the_cpu_model(built: Path, cuda: CopyingDevice, tmp_path: Path) -> None:
    checkpoint = built.parent / "checkpoint"
    build(make_spec(model=str(checkpoint), name="writes", output=tmp_path, slots=4, max_length=128))
    folder = Path(shutil.copytree(built / "writes" / "1", tmp_path / "on_cpu"))
    (folder / FILE).write_text(dump(replace(load_generation(folder), session=CUDA)))
    texts = ["the river", "A long day in the village, and", "the river"]
    assert answers(folder, texts) == answers(tmp_path / "writes" / "1", texts)


def answers(folder: Path, texts: list[str]) -> list[str]:
    """Return greedy answers to requests that run together, two with a common prefix."""
    service = Service(folder)
    service.loop.start()
    by_number: dict[int, str] = {}
    done = threading.Semaphore(0)
    for number, text in enumerate(texts):

        def respond(answer: Any, last: bool, number: int = number) -> None:
            by_number[number] = str(answer["text_output"][0]) if isinstance(answer, dict) else repr(answer)
            done.release()

        service.submit({"text_input": np.array([text], object)}, {"max_tokens": 24}, respond)
    for _ in texts:
        assert done.acquire(timeout=600)
    service.loop.stop()
    return [by_number[number] for number in range(len(texts))]


def test_repository_without_a_gpu_is_refused_in_one_line(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(built)]) == 0
    assert main(["serve", str(built)]) == 1
    assert "writes runs on a GPU and none is here" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="has no CUDAExecutionProvider: install onnxruntime-gpu"):
        Service(built / "writes" / "1")
    assert "CUDAExecutionProvider" not in onnxruntime.get_available_providers()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "CUDA's attention over a cache has fp16 and bf16, not fp32"),
        ({"precision": "int8"}, "not int8: use --precision fp16, or int8-weights or int4-weights for smaller weights"),
        ({"precision": "int4-weights", "block_size": 256}, "CUDA's kernel takes blocks of up to 128"),
        ({"precision": "fp16", "cache": "int8"}, "in the graph's own precision: leave --cache out"),
        ({"precision": "bf16", "executor": "bls", "triton": "25.08"}, "whose Python has no bf16"),
        ({"precision": "fp16", "gpu": {"devices": [0, 1]}}, "one cache, on one device"),
        ({"precision": "fp16", "target": "tensorrt"}, "TensorRT has no attention over a cache in place"),
    ],
)
def test_options_without_gpu_decoding_are_refused(
    options: dict[str, Any], message: str, built: Path, tmp_path: Path
) -> None:
    checkpoint = built.parent / "checkpoint"
    with pytest.raises(SpecError, match=message):
        build(make_spec(model=str(checkpoint), output=tmp_path / "r", **{"target": "cuda", **options}))
    assert not (tmp_path / "r" / "checkpoint").exists()


@pytest.mark.parametrize(("model_type", "message"), [("bloom", "adds a bias to scores"), ("gpt_oss", "has sinks")])
def test_scores_that_cuda_does_not_compute_are_refused(model_type: str, message: str, tmp_path: Path) -> None:
    checkpoint = make_decoder_checkpoint(tmp_path / "checkpoint", model_type)
    spec = make_spec(model=str(checkpoint), output=tmp_path / "r", target="cuda", precision="fp16", triton="25.10")
    with pytest.raises(SpecError, match=message):
        build(spec)


def test_dlpack_capsule_is_copied_to_the_host() -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    np.testing.assert_array_equal(copy_to_host(array.__dlpack__()), array)
