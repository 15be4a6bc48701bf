"""Decoders whose layers keep a state: the tokens of `model.generate`, whatever else runs beside a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from builder.building.pipeline import build
from builder.building.verify.emitted import generate
from builder.building.verify.generation import generate_with, geometry_of
from builder.common.errors import BuilderError
from builder.common.memory import cache_bytes, state_bytes
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.graph import Graph
from builder.options import WeightOptions, make_spec
from builder.runtime.contract import LayerShape, Session, load_generation
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.service import Service
from builder.serving.plan.machine import plan
from tests.decoders import make_decoder, make_decoder_checkpoint
from tests.generation.asked import Asked
from tests.tiny_encoders import VOCABULARY

STATEFUL = ("lfm2", "qwen3_next", "granitemoehybrid", "mamba2", "rwkv")  # each kind of state; two have no attention
LENGTHS = (1, 2, 40, 17, 3, 30, 9, 5)  # shorter and longer than a convolution is wide


@dataclass(frozen=True)
class Exported:
    """Model, its graph as ONNX Runtime fuses it, and the shapes of its layers' memory."""

    model: PreTrainedModel
    graph: Graph
    layers: tuple[LayerShape, ...]

    def executor(self, slots: int, max_length: int = 128) -> InProcess:
        geometry = geometry_of(self.layers, slots, max_length, VOCABULARY)
        return InProcess(self.graph.path, geometry, Session(threads=1))

    def generated(self, prompt: list[int], count: int) -> list[int]:
        """Return the greedy tokens of transformers."""
        tokens = generate_with(self.model, prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return [int(token) for token in tokens[0, len(prompt) :]]


@pytest.fixture(scope="module", params=STATEFUL)
def exported(request: pytest.FixtureRequest, module_folder: Callable[[str], Path]) -> Exported:
    model, folder = make_decoder(request.param), module_folder(request.param)
    result = export_decoder(model, folder, 128)
    return Exported(model, fuse(result.graph, folder), result.caches)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, VOCABULARY, length)]


def append(executor: InProcess, slot: int, tokens: list[int], held: int) -> np.ndarray:
    """Run `tokens` in a slot that holds `held` tokens; return the logits after the last."""
    return executor.run(slot, np.array([tokens]), np.array([held]))[0].copy()


def test_tokens_equal_generate_alone_and_in_batches(exported: Exported) -> None:
    """Eight prompts of unequal lengths join and leave four slots, and come in pieces of 16 tokens."""
    prompts = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [exported.generated(prompt, 24) for prompt in prompts]
    executor = exported.executor(4)
    assert generate(executor, prompts, 24) == expected
    assert [generate(executor, [prompt], 24)[0] for prompt in prompts] == expected
    assert len({token for text in expected for token in text}) > 20, "not one token repeated"


def test_rows_that_a_call_does_not_append_to_keep_their_state(exported: Exported) -> None:
    prompt, executor = tokens_of(9), exported.executor(3)
    for slot in range(3):
        append(executor, slot, prompt, 0)
    expected = append(executor, 1, [7], 9)
    append(executor, 1, prompt, 0)
    executor.run(0, np.array([[5], [6], [7]]), np.array([9, 9, 9]), np.array([2, 0]))
    np.testing.assert_allclose(append(executor, 1, [7], 9), expected, atol=1e-5)


def test_a_slot_that_starts_anew_forgets_its_state(exported: Exported) -> None:
    prompt, executor = tokens_of(6), exported.executor(2)
    expected = append(executor, 0, prompt, 0)
    append(executor, 1, tokens_of(30, 1), 0)
    np.testing.assert_allclose(append(executor, 1, prompt, 0), expected, atol=1e-5)


def test_copied_slot_continues_like_its_source(exported: Exported) -> None:
    prompt, executor = tokens_of(6), exported.executor(2)
    append(executor, 0, prompt, 0)
    append(executor, 1, tokens_of(9, 1), 0)
    executor.copy(0, 1, len(prompt))
    np.testing.assert_allclose(append(executor, 1, [7], 6), append(executor, 0, [7], 6), atol=1e-5)


def begin(loop: DecodeLoop, prompt: list[int], count: int) -> Asked:
    """Submit a greedy request to `loop`."""
    asked = Asked(prompt, count)
    loop.submit(asked.sequences)
    return asked


def test_continued_prompt_answers_like_a_new_one(exported: Exported) -> None:
    """The state goes on from the end of the answer before; a cancelled prompt leaves one that no other continues."""
    loop = DecodeLoop(exported.executor(2), SchedulerLimits(queue=2, prefill_tokens=16))
    first = tokens_of(9)
    begin(loop, first, 12)
    loop.run_until_idle()
    prompt = [*first, *exported.generated(first, 12), 7, 8]
    asked = begin(loop, prompt, 12)
    loop.run_until_idle()
    assert loop.stats.reused_tokens == len(first) + 11, "all but the last token of the answer"
    assert asked.tokens == exported.generated(prompt, 12)

    long = tokens_of(60, 1)
    cancelled = begin(loop, long, 12)
    loop.step()
    assert cancelled.request.cancel()
    asked = begin(loop, long[:40], 12)
    loop.run_until_idle()
    assert asked.tokens == exported.generated(long[:40], 12)


def test_states_do_not_let_the_loop_guess(exported: Exported) -> None:
    executor = exported.executor(1)
    assert executor.has_states
    assert not executor.can_speculate


@pytest.mark.parametrize(("precision", "error"), [("int8-weights", 0.06), ("int4-weights", 0.7)])
def test_states_take_quantised_weights(exported: Exported, precision: str, error: float, tmp_path: Path) -> None:
    """Every product is quantised, and logits after 40 tokens are near those of fp32: at most `error` of their size."""
    quantised = quantise_weights(exported.graph, precision, WeightOptions(32, symmetric=True), tmp_path)
    assert quantised.matmuls >= exported.graph.operators["MatMul"] + exported.graph.operators["Gemm"]
    assert not quantised.left_alone
    other = replace(exported, graph=quantised.graph)
    logits = [append(one.executor(1), 0, tokens_of(40), 0) for one in (exported, other)]
    assert np.linalg.norm(logits[0] - logits[1]) < error * np.linalg.norm(logits[0])


def built(folder: Path, **options: object) -> Path:
    """Build an LFM2 in fp32; return the folder of its version."""
    checkpoint = make_decoder_checkpoint(folder / "checkpoint", "lfm2")
    given = {"precision": "fp32", "slots": 4, "max_length": 128, "engine": "onnxruntime", **options}
    report = build(make_spec(model=str(checkpoint), name="m", output=folder / "out", **given))
    assert any("1 of 2 layers keep a state of fixed size" in warning for warning in report.warnings)
    assert report.attention == {"fused": 1, "layers": 1}
    return folder / "out" / "m" / "1"


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_conversation_reuses_its_state_and_no_other_prompt_does(engine: str, tmp_path: Path) -> None:
    """A prompt that continues what a slot has reuses all of it; one that shares only its beginning reuses nothing."""
    version = built(tmp_path, engine=engine)
    service = Service(version)
    assert load_generation(version).arena.layers[0].states

    def answered(text: str) -> tuple[str, int]:
        answers: list[Any] = []
        tensors = {"text_input": np.array([text], object)}
        options = {"max_tokens": 12, "ignore_eos": True}
        service.submit(tensors, options, lambda answer, last: answers.append(answer))
        before = service.loop.stats.reused_tokens
        service.loop.run_until_idle()
        return str(answers[0]["text_output"].tolist()[0]), service.loop.stats.reused_tokens - before

    first = "The museum in Oslo opens"
    answer, reused = answered(first)
    assert reused == 0
    assert answered(first) == (answer, 0), "the state is past the end of this prompt"
    assert answered("The museum in Bergen") == (answered("The museum in Bergen")[0], 0)
    tokens = service.loop.cache.tokens[next(s for s, t in enumerate(service.loop.cache.tokens) if t)]
    assert service.loop.cache.allocate([*tokens, 7]).reused == len(tokens)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"target": "cuda", "engine": None, "precision": "fp16"},
            "for which this engine has no memory.* on the CPU: --engine onnxruntime, --engine openvino$",
        ),
        ({"executor": "bls"}, "leave --executor bls out"),
        ({"draft": "checkpoint"}, "lfm2 keep a state, which a rejected guess cannot be taken out of"),
        ({"triton": "24.10"}, "CausalConvWithState with the channels last"),
    ],
)
def test_build_refuses_what_has_no_memory_for_states(options: dict[str, object], reason: str, tmp_path: Path) -> None:
    if "draft" in options:
        options = {"draft": str(tmp_path / "checkpoint")}
    with pytest.raises(BuilderError, match=reason):
        built(tmp_path, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_plan_counts_states_once_for_each_slot(engine: str, tmp_path: Path) -> None:
    layers = [LayerShape(0, 0, [[2, 32], [4, 8, 8]]), LayerShape(2, 8)]
    assert state_bytes(layers) == 4 * (2 * 32 + 4 * 8 * 8)
    assert cache_bytes(layers, 3, 10) == cache_bytes(layers[1:], 3, 10)
    checkpoint = make_decoder_checkpoint(tmp_path / "checkpoint", "lfm2")
    load = {"requests_per_s": 1, "tokens": 8, "answer_tokens": 8}
    (planned,), _ = plan([make_spec(model=str(checkpoint), output=tmp_path, load=load, engine=engine)])
    assert any("of states" in line.formula for line in planned.lines)
