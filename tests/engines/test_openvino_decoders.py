"""Decoders over OpenVINO's paged attention: text equals transformers', in a batch that rows join and leave."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from builder.building.pipeline import build
from builder.building.verify.emitted import PromptedRequest, answer, generate
from builder.building.verify.generation import generate_with, geometry_of, make_reference, measure
from builder.building.verify.long_rows import ask_long_row, refuse_wrong_long_row
from builder.common.errors import ExportError, SpecError
from builder.engines import decoding, graph_engine
from builder.engines.decoding import engine_of, opened
from builder.engines.openvino import decoder_properties
from builder.engines.openvino.lowering import page_attention
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import DecoderExport, export_decoder
from builder.graphs.export.states import decays_by_key
from builder.graphs.onnx.graph import Graph, load_graph
from builder.graphs.onnx.operators import STATEFUL
from builder.options import WeightOptions, make_spec
from builder.repository.check import check
from builder.repository.report.record import read_report
from builder.runtime.contract import CacheType, LayerShape, Session, load_generation
from builder.runtime.fields import InputError
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors import openvino as executors_of_openvino
from builder.runtime.generation.executors.openvino import OpenVinoExecutor, compile_paged
from builder.runtime.generation.executors.openvino_graph import BLOCK
from builder.runtime.generation.executors.paged import PAGED_STATES
from builder.runtime.generation.executors.states import APPENDED_ROWS
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.service import Service
from scripts.tiny_models import tiny_config
from tests.decoders import DECODERS, SIZES, make_decoder, make_decoder_checkpoint
from tests.generation.asked import Asked
from tests.generation.test_cuda_executor import answers
from tests.graphs.test_decoders import NEW_TOKENS, best_tokens, prompts
from tests.tiny_encoders import VOCABULARY

REFUSED = {"gemma2": "caps scores", "llama4_text": "in chunks", "jamba": "at its own rate"}
REFUSED_TOO = {  # by the same code, or by the engine of a build before it exports
    "inkling_text": "place of their query", "inkling2_text": "place of their query", "qwen4_exp_text": "64 bits",
    "rwkv": "a Scan", "xlstm": "a Scan",
}  # fmt: skip
KEEPING = ("lfm2", "qwen3_next", "granitemoehybrid")  # convolutions, the gated delta rule, Mamba 2
# fused QKV, windows, ALiBi, partial rotation, sinks, latents
CHECKED = ("gpt2", "mistral", "bloom", "gpt_neox", "gpt_oss", "minicpm3")


def paged(model_type: str, folder: Path, **options: object) -> tuple[DecoderExport, Graph]:
    result = export_decoder(make_decoder(model_type, **options), folder, 128)
    return result, page_attention(result.graph, folder)


def executor_of(exported: DecoderExport, graph: Graph, slots: int, cache: CacheType = "float32") -> OpenVinoExecutor:
    executor = opened(graph, 1)(geometry_of(exported.caches, slots, 128, VOCABULARY, cache))
    assert isinstance(executor, OpenVinoExecutor)
    return executor


def check_text_against_transformers(model_type: str, folder: Path, **options: object) -> None:
    check_text(make_decoder(model_type, **options), *paged(model_type, folder, **options))


def check_text(model: PreTrainedModel, exported: DecoderExport, graph: Graph) -> None:
    executor = executor_of(exported, graph, 4)
    actual = generate(executor, prompts(), NEW_TOKENS)
    assert actual == [best_tokens(model, prompt, text) for prompt, text in zip(prompts(), actual, strict=True)]
    assert graph.operators["PagedAttention"] == exported.attentions
    states = sum(len(layer.states) for layer in exported.caches)
    assert sum(graph.operators[name] for name in PAGED_STATES) == states
    assert not {"GroupQueryAttention", *STATEFUL} & set(graph.operators)
    refuse_wrong_long_row(ask_long_row(model, 128), executor)


@pytest.mark.parametrize("model_type", CHECKED)
def test_greedy_text_equals_transformers(model_type: str, tmp_path: Path) -> None:
    check_text_against_transformers(model_type, tmp_path)


def test_keys_larger_than_values_equal_transformers(tmp_path: Path) -> None:
    check_text_against_transformers("minicpm3", tmp_path, kv_lora_rank=128, v_head_dim=8)


@pytest.mark.every_architecture
@pytest.mark.parametrize(
    "model_type", [name for name in DECODERS if name not in (*CHECKED, *KEEPING, *REFUSED, *REFUSED_TOO)]
)
def test_greedy_text_equals_transformers_in_every_architecture(model_type: str, tmp_path: Path) -> None:
    check_text_against_transformers(model_type, tmp_path)


@pytest.fixture(scope="module", params=KEEPING)
def keeping(request: pytest.FixtureRequest, module_folder: Callable[[str], Path]) -> tuple[str, DecoderExport, Graph]:
    """Export a decoder whose layers keep states, by its type."""
    return request.param, *paged(request.param, module_folder(request.param))


def test_text_of_layers_with_states_equals_transformers(keeping: tuple[str, DecoderExport, Graph]) -> None:
    model_type, exported, graph = keeping
    check_text(make_decoder(model_type), exported, graph)
    constants = {tensor.name for tensor in load_graph(graph.path).graph.initializer}
    assert APPENDED_ROWS not in constants, "every row of a call appends: nothing chooses rows"


def test_states_follow_their_sequences(keeping: tuple[str, DecoderExport, Graph]) -> None:
    """They are cleared for a new text, copied with a slot, and stay as they are while other rows advance."""
    _, exported, graph = keeping
    executor, prompt = executor_of(exported, graph, 3), [int(token) for token in prompts()[-1]]
    executor.run(0, np.array([[9, 8, 7]]), np.array([0]))
    first = executor.run(0, np.array([prompt]), np.array([0]))[0].copy()
    executor.copy(0, 2, len(prompt))
    executor.run(1, np.array([[5, 6]]), np.array([0]))
    next_one = executor.run(0, np.array([[7]]), np.array([len(prompt)]))[0].copy()
    after = executor.run(2, np.array([[7]]), np.array([len(prompt)]))[0].copy()
    np.testing.assert_allclose(after, next_one, atol=1e-5)
    np.testing.assert_allclose(executor.run(1, np.array([prompt]), np.array([0]))[0], first, atol=1e-5)
    assert executor.has_states
    assert not executor.can_speculate, "a rejected token cannot be taken out of a state"
    held = sum(states.nbytes for states in executor.states)
    assert held == 3 * graph_engine("openvino").state_bytes(exported.caches)


def test_beams_copy_states_with_their_blocks(keeping: tuple[str, DecoderExport, Graph]) -> None:
    model_type, exported, graph = keeping
    prompt, rules = prompts()[-1], Rules(RequestOptions(temperature=0.0, num_beams=3), max_tokens=12)
    ((best,),) = answer(executor_of(exported, graph, 3), [PromptedRequest(tuple(prompt), rules)])
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    expected = generate_with(make_decoder(model_type), prompt, **settings)[0, len(prompt) :]
    assert list(best.tokens) == expected.tolist()


def test_preempted_sequences_compute_their_states_anew(keeping: tuple[str, DecoderExport, Graph]) -> None:
    """Three texts of three blocks each over five blocks; then a prompt that continues a whole text reuses its state."""
    _, exported, graph = keeping
    geometry = replace(geometry_of(exported.caches, 3, 128, VOCABULARY), blocks=5)
    loop = DecodeLoop(opened(graph, 1)(geometry), SchedulerLimits(100, 16))
    beginnings = [np.random.default_rng(seed).integers(5, VOCABULARY, 30).tolist() for seed in range(3)]
    requests = [Asked(prompt, 40) for prompt in beginnings]
    for one in requests:
        loop.submit(one.sequences)
    loop.run_until_idle()
    assert loop.stats.preemptions
    alone = generate(executor_of(exported, graph, 1), [*beginnings, [*beginnings[0], *requests[0].tokens, 7]], 40)
    assert [one.tokens for one in requests] == alone[:3]
    loop = DecodeLoop(executor_of(exported, graph, 2), SchedulerLimits(100, 16))
    for prompt in (beginnings[0], [*beginnings[0], *requests[0].tokens, 7]):
        asked = Asked(prompt, 40)
        loop.submit(asked.sequences)
        loop.run_until_idle()
    assert loop.stats.reused_tokens == 30 + 39
    assert asked.tokens == alone[3]


def test_decode_loop_of_openvino_pins_no_threads(tmp_path: Path) -> None:
    exported, graph = paged("gpt2", tmp_path)
    compiled = executor_of(exported, graph, 1).request.get_compiled_model()
    assert compiled.get_property("ENABLE_CPU_PINNING") is False


def test_openvino_step_reuses_the_tensors_of_an_equal_step(tmp_path: Path) -> None:
    """A step fills its input tensors in place and replaces them only if the shape changes, from two rows to one."""
    exported, graph = paged("gpt2", tmp_path)
    executor, other = (executor_of(exported, graph, 2) for _ in range(2))
    rows = [prompts()[0], prompts()[2]]
    for each in (executor, other):
        for slot, row in enumerate(rows):
            each.run(slot, np.array([row]), np.array([0]))
    said, places = [], [np.array([1, 0]), np.array([0, 1]), np.array([1])]
    anew: list[str] = []
    given = executor.request.set_tensor

    def noted(name: str, tensor: Any) -> None:
        anew.append(name)
        given(name, tensor)

    executor.request.set_tensor = noted  # type: ignore[method-assign]
    sets = []
    for step, wanted in enumerate(places):
        tokens, lengths = np.array([[7 + step], [9 + step]]), np.array([len(row) + step for row in rows])
        said.append(executor.run(0, tokens, lengths, wanted).copy())
        sets.append(set(anew))
        anew.clear()
    assert not sets[1]
    assert sets[2] == set(executor.inputs.arrays) - {"max_context_len"}, "of one row instead of two"
    for slot, row in enumerate(rows):
        run = [7 + slot * 2, 8 + slot * 2, 9 + slot * 2][: 3 if slot else 2]
        logits = other.run(slot, np.array([run]), np.array([len(row)]), np.arange(len(run)))
        for step, wanted in enumerate(places[: len(run)]):
            np.testing.assert_allclose(said[step][wanted.tolist().index(slot)], logits[step], atol=1e-4)


def test_executor_is_freed_before_its_graph_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each executor holds all weights; a reference cycle through its loop leaves it to the garbage collector."""
    monkeypatch.setattr(decoding, "has_many", lambda weights: True)
    exported, graph = paged("gpt2", tmp_path)
    executors = opened(graph, 1)
    alive: list[bool] = []

    class Compiled(OpenVinoExecutor):
        def __init__(self, *arguments: Any) -> None:
            alive.append(before() is not None)
            super().__init__(*arguments)

    gc.disable()  # the executor must be freed explicitly
    try:
        executor = executors(geometry_of(exported.caches, 1, 128, VOCABULARY))
        executor.loop = executor  # type: ignore[attr-defined]
        before = weakref.ref(executor)
        del executor
        monkeypatch.setattr(executors_of_openvino, "OpenVinoExecutor", Compiled)
        executors(geometry_of(exported.caches, 2, 128, VOCABULARY))
    finally:
        gc.enable()
    assert alive == [False]


@pytest.mark.parametrize("model_type", REFUSED)
def test_page_attention_refuses_unsupported_attention_by_name(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=REFUSED[model_type]):
        paged(model_type, tmp_path)


@pytest.mark.every_architecture
@pytest.mark.parametrize("model_type", REFUSED_TOO)
def test_page_attention_refuses_every_unsupported_layer_by_name(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=REFUSED_TOO[model_type]):
        paged(model_type, tmp_path)


def test_openvino_plans_states_and_refuses_models_without_keys() -> None:
    layers = [LayerShape(0, 0, [[2, 32], [4, 8, 8]]), LayerShape(2, 8)]
    spec = make_spec(model="model", engine="openvino", slots=4)
    engine, states = engine_of(spec), 4 * 4 * (3 * 32 + 4 * 8 * 8)
    memory, without = (engine.plan_memory(shapes, 0, 128) for shapes in (layers, layers[1:]))
    assert memory.cache - without.cache == states
    assert engine.blocks(layers, memory) == engine.blocks(layers[1:], without) == 4 * 128 // BLOCK
    engine.refuse_states(layers, False)
    engine.refuse_states(layers[1:], True)
    with pytest.raises(SpecError, match="keeps keys and values"):
        engine.refuse_states(layers[:1], False)
    with pytest.raises(SpecError, match="at its own rate"):
        engine.refuse_states(layers, True)
    small = engine_of(make_spec(model="model", engine="openvino", slots=4, cache_gb=states / 1e9))
    with pytest.raises(SpecError, match="states of 4 slots take"):
        small.plan_memory(layers, 0, 128)


@pytest.mark.parametrize(
    ("model_type", "by_key"), [("kimi_linear", True), ("jamba", True), ("qwen3_next", False), ("lfm2", False)]
)
def test_states_that_decay_by_key_are_known_before_the_export(model_type: str, by_key: bool) -> None:
    with torch.device("meta"):
        assert decays_by_key(AutoModelForCausalLM.from_config(tiny_config("CAUSAL_LM", model_type))) == by_key


@pytest.mark.parametrize("precision", ["int8", "int8-weights", "int4-weights"])
def test_openvino_decoder_of_smaller_weights_keeps_most_tokens(precision: str, tmp_path: Path) -> None:
    """Tied weights are stored once, and every product is quantised."""
    exported, graph = paged("gpt2", tmp_path)
    quantised = quantise_weights(graph, precision, WeightOptions(32, symmetric=True), tmp_path)
    assert quantised.matmuls == 4 * SIZES["num_hidden_layers"] + 1
    assert quantised.embeddings == 1
    assert quantised.graph.size < graph.size
    reference = make_reference(make_decoder("gpt2"), [prompt for prompt in prompts() if len(prompt) > 9])
    exact = measure(opened(graph, 1), exported.caches, VOCABULARY, reference)
    agreement = measure(opened(quantised.graph, 1), exported.caches, VOCABULARY, reference)
    assert exact.mean == 1
    assert exact.error < 1e-3
    assert agreement.mean > (0.5 if precision == "int4-weights" else 0.9)
    assert agreement.error > 1e-4
    assert agreement.same_alone == 1, "a row's answer does not depend on the rows beside it"


@pytest.mark.parametrize("precision", ["int8", "int8-weights"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_scaled_logits_keep_the_output_matrix_in_bytes(precision: str, tied: bool, tmp_path: Path) -> None:
    """Regression: OpenVINO multiplied the factor of Granite's logits into the matrix, which it then kept in fp32."""
    options = {"logits_scaling": 3.0, "tie_word_embeddings": tied}
    _, graph = paged("granite", tmp_path, **options)
    quantised = quantise_weights(graph, precision, WeightOptions(32, symmetric=True), tmp_path).graph
    model = compile_paged(quantised.path, Session(entries=decoder_properties("float32")))
    weights = [
        node.input_value(1).get_element_type().to_string()
        for node in model.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].value == "FullyConnected"
    ]
    assert len(weights) == 4 * SIZES["num_hidden_layers"] + 1
    assert set(weights) <= {"i8", "u8"}


def test_smaller_cache_takes_the_planned_memory(tmp_path: Path) -> None:
    exported, graph = paged("llama", tmp_path)
    types: tuple[CacheType, ...] = ("float32", "float16", "uint8")
    for cache in types:
        executor = executor_of(exported, graph, 2, cache)
        held = sum(array.nbytes for array in executor.caches)
        assert held == executor.blocks.num_blocks * graph_engine("openvino").block_bytes(exported.caches, cache)
        assert executor.caches[0].dtype == np.dtype(cache)
    reference = make_reference(make_decoder("llama"), [prompt for prompt in prompts() if len(prompt) > 9])
    assert measure(opened(graph, 1), exported.caches, VOCABULARY, reference, "uint8").mean > 0.9
    assert measure(opened(graph, 1), exported.caches, VOCABULARY, reference, "float16").error < 1e-2


@pytest.mark.parametrize("cache", ["float32", "float16", "uint8"])
def test_speculating_rows_answer_as_without_speculation(cache: CacheType, tmp_path: Path) -> None:
    """Text from random weights soon repeats itself, so that tokens are accepted."""
    exported, graph = paged("llama", tmp_path)
    beginnings = [np.random.default_rng(seed).integers(5, VOCABULARY, 12).tolist() * 2 for seed in range(3)]
    executor, texts = executor_of(exported, graph, 3, cache), []
    assert executor.can_speculate
    for executor.can_speculate in (False, True):
        loop = DecodeLoop(executor, SchedulerLimits(100, 64), False)
        requests = [Asked(prompt, 90) for prompt in beginnings]
        for one in requests:
            loop.submit(one.sequences)
        loop.run_until_idle()
        texts.append([one.tokens for one in requests])
        assert (loop.stats.right_guesses > 0) == executor.can_speculate
    assert texts[0] == texts[1]


@pytest.mark.parametrize("cache", ["float32", "uint8"])
def test_few_tokens_of_a_row_run_as_rows_of_one_token(cache: CacheType, tmp_path: Path) -> None:
    """Regression: rows with guesses were attended to as prompts, which took up to three times as long."""
    rows, new = 3, 8
    executor = executor_of(*paged("llama", tmp_path), rows, cache)
    guessed = np.arange(10, 10 + rows * new).reshape(rows, new)
    for slot, row in enumerate(np.random.default_rng(0).integers(5, VOCABULARY, (rows, 40))):
        executor.run(slot, row[None], np.array([0]))
    together = executor.run(0, guessed, np.full(rows, 40), np.arange(rows * new)).copy()
    assert executor.inputs.arrays["past_lens"].tolist() == rows * list(range(40, 40 + new))
    alone = [executor.run(0, guessed[:, [step]], np.full(rows, 40 + step)).copy() for step in range(new)]
    np.testing.assert_allclose(together.reshape(rows, new, -1), np.stack(alone, axis=1), atol=1e-5)
    for tokens, past in ((4, [40, 41, 42, 43]), (5, [40])):
        executor.run(0, np.arange(tokens)[None], np.array([40]))
        assert executor.inputs.arrays["past_lens"].tolist() == past


def test_rejected_token_leaves_no_trace_in_an_int8_cache(tmp_path: Path) -> None:
    """Regression: keys were rounded by channel, so that each token rounded those before it in its block anew."""
    executor, kept = executor_of(*paged("llama", tmp_path), 1, "uint8"), 5
    executor.run(0, np.arange(5, 5 + kept)[None], np.array([0]))
    (block,) = executor.blocks.block_tables[0]
    before = [cache[block, :, :kept].copy() for cache in executor.caches]
    executor.run(0, np.arange(40, 48)[None], np.array([kept]))
    for cache, held in zip(executor.caches, before, strict=True):
        np.testing.assert_array_equal(cache[block, :, :kept], held)


@pytest.fixture(scope="module")
def built(module_folder: Callable[[str], Path]) -> Path:
    """Build a repository with `writes`: 8-bit weights and cache, and blocks for a text and a half."""
    folder = module_folder("openvino")
    checkpoint = make_decoder_checkpoint(folder / "checkpoint", "llama")
    options = {"precision": "int8", "cache": "int8", "cache_gb": 0.00002, "max_length": 128, "quality": 0.5}
    spec = make_spec(
        model=str(checkpoint), name="writes", output=folder / "repository", engine="openvino", perplexity=1.5, **options
    )
    build(spec)
    return folder / "repository"


def test_built_repository_answers_more_rows_than_fit_into_its_cache(built: Path) -> None:
    texts = [f"The museum in Oslo {number} " * 4 for number in range(5)]
    service = Service(built / "writes" / "1")
    count = service.loop.cache.blocks
    assert count is not None
    assert 4 <= count.num_blocks < 8, "a text of 128 tokens, and less than two"
    alone = [answers(built / "writes" / "1", [text])[0] for text in texts[:2]]
    assert answers(built / "writes" / "1", texts)[:2] == alone


def test_report_has_the_verification_of_an_openvino_decoder(built: Path) -> None:
    assert check(built) == []
    report = read_report(built, "writes")
    assert [measured.name for measured in report.variants] == ["PyTorch fp32", "fp32", "int8", "int8, int8 cache"]
    assert report.engine == "openvino"
    layers = int(SIZES["num_hidden_layers"])
    assert report.attention == {"fused": layers, "layers": layers}
    assert report.operators["PagedAttention"] == layers
    assert report.quantised is not None
    assert report.quantised["matmuls"] == 4 * layers + 1
    serving = load_generation(built / "writes" / "1")
    assert serving.session.entries["INFERENCE_PRECISION_HINT"] == "f32", "whatever the CPU is fast at"
    assert serving.arena.dtype == "uint8"
    blocks = serving.arena.blocks
    assert blocks is not None
    assert report.memory is not None
    assert (
        report.memory["cache"] == blocks * graph_engine("openvino").block_bytes(serving.arena.layers, "uint8") <= 20_000
    )
    (only,) = report.verified_on
    assert (only.engine, only.version, only.verified) == ("openvino", version("openvino"), True)


def test_request_larger_than_the_whole_cache_is_an_error(built: Path) -> None:
    service = Service(built / "writes" / "1")
    text = {"text_input": np.array(["The museum in Oslo"], object)}
    with pytest.raises(InputError, match=r"4 beams of up to \d+ tokens need \d+ blocks .* larger --cache-gb"):
        service.submit(text, {"max_tokens": 100, "num_beams": 4}, lambda answer, last: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "openvino", "cache_gb": 0.00002}, "a text of 128 tokens needs 4"),
        ({"engine": "openvino", "executor": "bls"}, "--executor bls"),
        ({"cache": "fp16"}, "--cache fp16 is for --engine openvino"),
        ({"cache_gb": 1}, "--cache-gb is for --engine openvino, .* use --slots"),
        ({"engine": "openvino", "cache_gb": 5, "machine": {"memory_gb": 4}}, "takes 5.0 GB and 4.0 GB may be used"),
    ],
)
def test_openvino_decoder_refuses_options_before_the_export(options: dict[str, Any], message: str, built: Path) -> None:
    spec = make_spec(model=str(built.parent / "checkpoint"), output=built.parent / "no", max_length=128, **options)
    with pytest.raises(SpecError, match=message):
        build(spec)
