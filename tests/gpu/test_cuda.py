"""On a real GPU: the graphs of --target cuda in ONNX Runtime's CUDA, and the decode loop with its cache there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from builder import Client, build, make_spec, running
from builder.building.variants.candidates import VariantMaker
from builder.building.verify.emitted import generate
from builder.building.verify.generation import geometry_of
from builder.checkpoints.resolve import resolve
from builder.common.samples import TEXTS
from builder.engines.cuda.blocks import page_attention
from builder.engines.encoding import Variant
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.half_precision import to_half
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.export.encoder import export
from builder.graphs.onnx.slots import slot_copier
from builder.options import WeightOptions
from builder.runtime.contract import Session
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors.base import Executor
from builder.runtime.generation.executors.cuda import ELEMENTS
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.executors.onnxruntime_cuda import Cuda
from builder.runtime.generation.executors.onnxruntime_cuda_blocks import CudaBlocks
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.stats import Stats
from tests.decoders import make_decoder
from tests.generation.asked import Asked
from tests.graphs.test_decoders import prompts
from tests.models import minilm
from tests.tiny_encoders import VOCABULARY

pytestmark = pytest.mark.gpu
CUDA = "CUDAExecutionProvider"


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if CUDA not in onnxruntime.get_available_providers():
        pytest.fail("a GPU is here and this onnxruntime has no CUDA: install onnxruntime-gpu instead of onnxruntime")


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.99999), ("fp16", 0.9999), ("bf16", 0.999)])
def test_encoder_answers_on_cuda_as_on_the_cpu(precision: str, least: float, tmp_path: Path) -> None:
    spec = make_spec(model=str(minilm()), target="cuda", precision=precision, triton="25.08")
    checkpoint = resolve(spec)
    maker = VariantMaker(spec, export(checkpoint, tmp_path).graph, tmp_path, ())
    feed = dict(checkpoint.tokenizer(list(TEXTS[:8]), return_tensors="np", padding=True))
    graph = maker.make(Variant(precision, "onnxruntime", target="cuda")).graph
    actual, expected = (
        onnxruntime.InferenceSession(str(path), providers=[provider]).run(
            ["features"], {n: feed[n] for n in graph.inputs}
        )[0]
        for path, provider in ((graph.path, CUDA), (maker.fused.path, "CPUExecutionProvider"))
    )
    assert (actual * expected).sum(axis=-1).min() > least


def test_triton_serves_an_encoder_from_the_gpu(tmp_path: Path) -> None:
    build(make_spec(model=str(minilm()), name="minilm", output=tmp_path, target="cuda", precision="fp16"))
    with running(tmp_path) as server, Client(server.url, "minilm") as client:
        first, second = (np.array(client.ask({"text_input": text})["embedding"]) for text in TEXTS[:2])
    assert 0 < float(first @ second) < 0.99


@pytest.mark.parametrize("precision", ["fp16", "int8-weights", "int4-weights"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_decoder_text_on_cuda_equals_that_on_the_cpu(model_type: str, precision: str, tmp_path: Path) -> None:
    exported = export_decoder(make_decoder(model_type), tmp_path, 128)
    graph = fuse(exported.graph, tmp_path)
    if precision != "fp16":
        graph = quantise_weights(graph, precision, WeightOptions(32, True), tmp_path, products_of="cuda").graph
    half = to_half(graph, tmp_path / "half" / "model.onnx", real=("logits",))
    copier = slot_copier(exported.caches, ELEMENTS["float16"], half, tmp_path)
    geometry = geometry_of(exported.caches, 4, 128, VOCABULARY, "float16")
    ours = generate(Cuda(half.path, copier.path, geometry, Session(device="cuda")), prompts(), 32, prefill_tokens=256)
    theirs = generate(InProcess(half.path, geometry, Session(threads=1)), prompts(), 32)
    same = np.mean([a == b for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)])
    assert same > 0.8, "random weights: a tie may fall otherwise, and the text after it with it"


LONG = {"max_position_embeddings": 1024, "n_positions": 1024, "sliding_window": 300}  # a window ends in another block


def long_prompts() -> list[list[int]]:
    """Return four prompts of almost three blocks of 256 tokens each; three begin with the same two blocks and a bit."""
    generator = np.random.default_rng(0)
    beginning = generator.integers(5, VOCABULARY, 520).tolist()
    tails = [generator.integers(5, VOCABULARY, length).tolist() for length in (215, 225, 235, 750)]
    return [beginning + tail for tail in tails[:3]] + tails[3:]


def answered(executor: Executor) -> tuple[list[list[int]], Stats]:
    """Return 48 tokens after each prompt, in an engine with a prefix cache; each comes when the one before is read."""
    requests = [Asked(prompt, 48) for prompt in long_prompts()]
    loop = DecodeLoop(executor, SchedulerLimits(0, 256))
    for one in requests:
        loop.submit(one.sequences)
        for _ in range(4):
            loop.step()
    loop.run_until_idle()
    assert not any(one.errors for one in requests)
    return [one.tokens for one in requests], loop.stats


@pytest.mark.parametrize(
    ("model_type", "bounded"),
    [("llama", True), ("llama", False), ("gpt2", True), ("gemma2", True), ("mistral", True)],
)
def test_cuda_blocks_give_the_text_of_cuda_slots(model_type: str, bounded: bool, tmp_path: Path) -> None:
    """Give seven blocks of 256 tokens to four texts that would take twelve; without bounds as on a T4.

    They share their beginnings, grow into a fourth block each, and one is preempted and computed again.
    """
    exported = export_decoder(make_decoder(model_type, **LONG), tmp_path, 1024)
    half = to_half(fuse(exported.graph, tmp_path), tmp_path / "half" / "model.onnx", real=("logits",))
    copier = slot_copier(exported.caches, ELEMENTS["float16"], half, tmp_path)
    geometry = geometry_of(exported.caches, 4, 1024, VOCABULARY, "float16")
    on_gpu = Session(device="cuda")
    over_slots = Cuda(half.path, copier.path, geometry, on_gpu)
    print(f"{model_type}: beginnings of up to {over_slots.longest_range} of 1024 tokens are copied by themselves")
    in_slots, _ = answered(over_slots)
    over_blocks = page_attention(half, tmp_path, bounded)
    paged = CudaBlocks(over_blocks.path, copier.path, replace(geometry, blocks=7), on_gpu)
    in_blocks, stats = answered(paged)
    assert paged.blocks.block_size == 256
    assert stats.reused_tokens >= 2 * 512
    assert stats.preemptions > 0
    same = np.mean([a == b for x, y in zip(in_blocks, in_slots, strict=True) for a, b in zip(x, y, strict=True)])
    assert same > 0.8, "random weights: a tie may fall otherwise, and the text after it with it"
