"""Every decoder of the support table: greedy text equals transformers', in a batch that rows join and leave."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from builder.building.pipeline import build
from builder.building.verify.emitted import PromptedRequest, answer, generate
from builder.building.verify.generation import geometry_of
from builder.building.verify.long_rows import ask_long_row, refuse_wrong_long_row
from builder.building.verify.recording import Recorder
from builder.building.verify.seq2seq import cut
from builder.common.errors import ExportError, VerificationError
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import cache_shapes, export_decoder
from builder.graphs.export.rotary import constant_frequencies, fused_rotary
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.likeliest import finding_likeliest
from builder.options import WeightOptions, make_spec
from builder.runtime.contract import LayerShape, Session
from builder.runtime.generation.executors.base import CallPart
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from scripts.tiny_models import tiny_model
from tests.decoders import DECODERS, SIZES, WINDOW, make_decoder
from tests.tiny_encoders import VOCABULARY, make_tokenizer

LENGTHS = (5, 40, 17, 3, 30, 9)  # windows are 16: prompts and answers go far beyond
NEW_TOKENS = 64
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(5, VOCABULARY, length).tolist() for length in LENGTHS]


def exported(model_type: str, folder: Path, **options: object) -> tuple[Graph, list[list[int]], list[list[int]]]:
    """Return the fused graph, its text after the prompts in 4 slots, and transformers' text instead."""
    model = make_decoder(model_type, **options)
    result = export_decoder(model, folder, 128)
    graph = fuse(result.graph, folder)
    executor = InProcess(graph.path, geometry_of(result.caches, 4, 128, VOCABULARY), Session(threads=1))
    actual = generate(executor, prompts(), NEW_TOKENS)
    return graph, actual, [best_tokens(model, prompt, text) for prompt, text in zip(prompts(), actual, strict=True)]


def sharing(model_type: str) -> int:
    """Return how many layers share keys and values with an earlier one."""
    return int(DECODERS[model_type].options.get("num_kv_shared_layers", 0))


def best_tokens(model: PreTrainedModel, prompt: list[int], text: list[int]) -> list[int]:
    """Return the most probable token at each place of `text`, after `prompt` and the text before it, in one run.

    The tokens equal `text` if and only if greedy decoding gives `text`.
    """
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
    return [int(token) for token in logits[len(prompt) - 1 : -1].argmax(dim=-1)]


@pytest.mark.every_architecture
@pytest.mark.parametrize("model_type", DECODERS)
def test_greedy_text_equals_transformers(model_type: str, tmp_path: Path) -> None:
    graph, actual, expected = exported(model_type, tmp_path)
    assert actual == expected
    attending, keeping = (
        {name.split("_")[2] for name in graph.inputs if name.startswith(kind)} for kind in ("past_key_", "past_state_")
    )
    assert len(attending | keeping) >= SIZES["num_hidden_layers"]
    assert graph.operators["GroupQueryAttention"] == len(attending) + sharing(model_type)
    mixed = graph.operators["Softmax"] if model_type == "inkling2_text" else 0  # of the outputs of its layers
    routed = graph.operators["TopK"] + mixed
    assert graph.operators["Softmax"] <= routed, "only a router has one: an attention was left unfused"


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("falcon", {"alibi": True}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
        ("bloom", {"num_attention_heads": 2, "apply_residual_connection_post_layernorm": True}),
        ("deepseek_v2", {"q_lora_rank": 16, "rope_parameters": YARN}),
        ("deepseek_v3", {"rope_interleave": False, "attention_bias": True, "rope_parameters": YARN}),
        ("deepseek_v3", {"kv_lora_rank": 128, "v_head_dim": 8}),
        ("minicpm3", {"kv_lora_rank": 128, "v_head_dim": 32}),
    ],
)
def test_architecture_variants_equal_transformers(model_type: str, options: dict[str, object], tmp_path: Path) -> None:
    _, actual, expected = exported(model_type, tmp_path, **options)
    assert actual == expected


@pytest.mark.parametrize("model_type", ["bart", "whisper"])
def test_rows_of_different_lengths_share_a_batch_without_position_ids(model_type: str, tmp_path: Path) -> None:
    """Their decoders look positions up by the length of the cache, one for all rows; BART's first row is its third."""
    model = tiny_model("CAUSAL_LM", model_type)
    result = export_decoder(model, tmp_path, 128)
    geometry = geometry_of(result.caches, 4, 128, model.config.vocab_size)
    executor = InProcess(fuse(result.graph, tmp_path).path, geometry, Session(threads=1))
    actual = generate(executor, prompts(), NEW_TOKENS)
    assert actual == [best_tokens(model, prompt, text) for prompt, text in zip(prompts(), actual, strict=True)]


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, LayerShape(1, 16 + 8)), ({"kv_lora_rank": 128, "v_head_dim": 32}, LayerShape(4, 32))],
)
def test_cache_holds_latents_where_they_are_smaller(options: dict[str, object], kept: LayerShape) -> None:
    """A head has a key of 16 + 8 numbers, and each cache tensor the size of the larger of key and value."""
    assert cache_shapes(make_decoder("minicpm3", **options)) == (kept, kept)


@pytest.mark.parametrize("precision", ["int8-weights", "int4-weights"])
def test_products_around_latents_are_quantised(precision: str, tmp_path: Path) -> None:
    """The two products of each head, with three axes, stay as they are."""
    layers = int(SIZES["num_hidden_layers"])
    result = export_decoder(make_decoder("minicpm3"), tmp_path, 128)
    quantised = quantise_weights(fuse(result.graph, tmp_path), precision, WeightOptions(16, symmetric=True), tmp_path)
    assert quantised.matmuls == 5 * layers + 1, "scaled residuals hide none (regression: FusedMatMul)"
    assert quantised.graph.operators["MatMul"] == 2 * layers


@pytest.mark.parametrize(
    ("model_type", "additions"),
    [
        ("mistral", [{"sliding_window": 128}]),
        ("starcoder2", [{"sliding_window": 128}]),
        (
            "gemma2",
            [{"sliding_window": 128}, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}],
        ),
    ],
)
def test_graph_contains_what_an_architecture_adds(
    model_type: str, additions: list[dict[str, object]], tmp_path: Path
) -> None:
    """Compare probabilities on a row past the window with those of the same weights without each addition.

    Greedy text would not show every addition: a cap on the final logits does not change their order.
    """
    model = make_decoder(model_type)
    result = export_decoder(model, tmp_path, 128)
    executor = InProcess(result.graph.path, geometry_of(result.caches, 1, 128, VOCABULARY), Session(threads=1))
    refuse_wrong_long_row(ask_long_row(model, 128), executor)
    for without in additions:
        with pytest.raises(VerificationError, match="differ from PyTorch's"):
            refuse_wrong_long_row(ask_long_row(make_decoder(model_type, **without), 128), executor)


def test_graph_contains_the_sinks_of_each_head(tmp_path: Path) -> None:
    model = make_decoder("gpt_oss")
    result = export_decoder(model, tmp_path, 128)
    executor = InProcess(result.graph.path, geometry_of(result.caches, 1, 128, VOCABULARY), Session(threads=1))
    refuse_wrong_long_row(ask_long_row(model, 128), executor)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, -100.0)
    with pytest.raises(VerificationError, match="differ from PyTorch's"):
        refuse_wrong_long_row(ask_long_row(model, 128), executor)


def test_window_of_the_mask_reaches_the_operator(tmp_path: Path) -> None:
    """qwen2_moe passes no sliding_window to its attention; only the mask has it, and transformers applies it."""
    options = {"use_sliding_window": True, "max_window_layers": 1, "mlp_only_layers": [0, 1], "num_experts": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2_moe", **{**SIZES, **WINDOW, **options})
    model = AutoModelForCausalLM.from_config(config).eval()
    result = export_decoder(model, tmp_path, 128)
    assert "sliding_attention" in config.layer_types
    executor = InProcess(result.graph.path, geometry_of(result.caches, 1, 128, VOCABULARY), Session(threads=1))
    refuse_wrong_long_row(ask_long_row(model, 128), executor)


def test_fuse_merges_projections_and_rotations(tmp_path: Path) -> None:
    """One product for query, key and value, one for gate and up; one operator per rotation, and no Transpose."""
    graph, _, _ = exported("llama", tmp_path)
    layers = int(SIZES["num_hidden_layers"])
    assert graph.operators["MatMul"] == 4 * layers + 1
    assert graph.operators["RotaryEmbedding"] == 2 * layers
    assert graph.operators["SimplifiedLayerNormalization"] == 2 * layers + 1
    assert graph.operators["Transpose"] == 0


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("xlm", {}, "its tokens see those after them"),
        ("llama", {"is_causal": False}, "its tokens see those after them"),
    ],
)
def test_export_refuses_unsupported_models_by_name(
    model_type: str, options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, **{**SIZES, **options})
    with pytest.raises(ExportError, match=reason):
        export_decoder(AutoModelForCausalLM.from_config(config).eval(), tmp_path, 64)


def test_keys_chosen_by_an_index_limit_the_length_of_a_text(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"the 16 keys that an index chooses.*--max-length 16 or less"):
        export_decoder(make_decoder("deepseek_v32", index_topk=16), tmp_path, 17)


@pytest.mark.parametrize(
    ("model_type", "options", "seen"),
    [
        ("doge", {"keep_window_size": 16}, 16),
        ("big_bird", {"block_size": 4}, 28),
        ("qwen4_exp_text", {"indexer_budget": 16}, 19),
    ],
)
def test_tokens_that_do_not_see_all_before_them_limit_the_length(
    model_type: str, options: dict[str, object], seen: int, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=f"in texts of more than {seen} tokens .*--max-length {seen} or less"):
        export_decoder(make_decoder(model_type, **options), tmp_path, seen + 1)


def test_dynamic_rope_scaling_is_refused_beyond_its_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make_decoder("llama", rope_parameters=scaling)
    with pytest.raises(ExportError, match="--max-length 256 or less"):
        export_decoder(model, tmp_path, 300)
    assert export_decoder(model, tmp_path, 256).graph.operators["GroupQueryAttention"] == model.config.num_hidden_layers


def test_rope_scaling_of_one_layer_type_is_refused_too() -> None:
    changing = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    scaling = {"full_attention": changing, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    model = make_decoder("gemma3_text", rope_parameters=scaling)
    rotary = model.model.rotary_emb
    refused = pytest.raises(ExportError, match=r"its dynamic rotary scaling .* --max-length 256 or less")
    with refused, constant_frequencies(model, 300):
        pass
    with constant_frequencies(model, 256):
        assert rotary.rope_type == {"full_attention": "default", "sliding_attention": "default"}
    assert rotary.rope_type["full_attention"] == "dynamic"


def test_unfused_rotation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function with another behaviour is left unchanged and named, so that a build can report it."""
    model = make_decoder("llama")
    with fused_rotary(model) as left:
        assert left == ()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos, k * sin))
    with fused_rotary(model) as left:
        assert left == ("modeling_llama.apply_rotary_pos_emb",)


def test_build_refuses_unsupported_options_before_measuring(tmp_path: Path) -> None:
    model = tiny_model("CAUSAL_LM", "reformer")
    model.save_pretrained(tmp_path / "checkpoint")
    make_tokenizer("bpe", type_ids=False).save_pretrained(tmp_path / "checkpoint")
    spec = make_spec(model=str(tmp_path / "checkpoint"), name="m", output=tmp_path / "out", max_length=64)
    with pytest.raises(ExportError, match="reformer cannot be served for generation: its tokens see those in the"):
        build(spec)
    assert not (tmp_path / "out").exists()


SEARCHES: tuple[dict[str, Any], ...] = (
    {"num_beams": 3},
    {"num_beams": 4, "length_penalty": 0.5, "no_repeat_ngram_size": 2, "n": 2},
    {"num_beams": 2, "early_stopping": "true"},
    {},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never", "min_tokens": 15},
    {"num_beams": 2, "repetition_penalty": 1.3},
)


def searched(model: PreTrainedModel, prompt: tuple[int, ...], options: RequestOptions) -> list[list[int]]:
    """Return the beam search of transformers."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        rows = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            num_beams=options.num_beams,
            num_return_sequences=options.n,
            length_penalty=options.length_penalty,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
            repetition_penalty=options.repetition_penalty,
            min_new_tokens=options.min_tokens or None,
            early_stopping={"true": True, "false": False, "never": "never"}[options.early_stopping],
            eos_token_id=3,
            pad_token_id=0,
        )
    return [list(cut(row[len(prompt) :].tolist(), (3,), 20)) for row in rows]


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bloom", "gemma4_text", "lfm2"])
def test_beam_search_of_a_decoder_equals_transformers(model_type: str, tmp_path: Path) -> None:
    """Beam searches of unequal prompts and a greedy row share a batch; they read the graph's most probable tokens."""
    model = make_decoder(model_type)
    result = export_decoder(model, tmp_path, 128)
    graph = finding_likeliest(fuse(result.graph, tmp_path))
    executor = InProcess(graph.path, geometry_of(result.caches, 18, 128, VOCABULARY), Session(threads=1))
    searches = [
        PromptedRequest(tuple(prompt), Rules(RequestOptions(temperature=0.0, **options), (3,), max_tokens=20))
        for prompt, options in zip(prompts(), SEARCHES, strict=True)
    ]
    recorder = Recorder(executor)
    found = answer(executor, searches)
    for one, answers in zip(searches, found, strict=True):
        options = one.rules.options
        got = [list(cut(hypothesis.tokens, (3,), 20)) for hypothesis in answers]
        assert got == searched(model, one.prompt, options), options
    asked = Counter(name for name, _ in recorder.calls)
    assert asked["likeliest"] >= 4, "of the prompts of those that search, beside whom nobody needs all"
    executor.has_likeliest = False
    again = answer(executor, searches)
    assert [[one.tokens for one in answers] for answers in again] == [[one.tokens for one in two] for two in found]


def test_search_that_changes_no_scores_reads_few_of_them(tmp_path: Path) -> None:
    """Beside a greedy row; log-probabilities, biases or unfiltered sampling need all logits of the shared steps."""
    result = export_decoder(make_decoder("gpt2"), tmp_path, 128)
    graph = finding_likeliest(fuse(result.graph, tmp_path))
    executor = InProcess(graph.path, geometry_of(result.caches, 4, 128, VOCABULARY), Session(threads=1))
    recorder = Recorder(executor)
    prompt = tuple(prompts()[0])
    search, model = RequestOptions(temperature=0.0, num_beams=3), make_decoder("gpt2")
    for beside, few in (
        (RequestOptions(temperature=0.0), True),
        (RequestOptions(temperature=0.9, top_k=12), True),
        (RequestOptions(temperature=0.9), False),
        (RequestOptions(temperature=0.0, logprobs=2), False),
        (RequestOptions(temperature=0.0, logit_bias={7: 1.0}), False),
    ):
        recorder.calls.clear()
        asked = [
            PromptedRequest(prompt, Rules(search, (3,), max_tokens=20)),
            PromptedRequest(prompt, Rules(beside, max_tokens=20)),
        ]
        hypotheses, _ = answer(executor, asked)
        assert [list(cut(one.tokens, (3,), 20)) for one in hypotheses] == searched(model, prompt, search)
        read = Counter(name for name, _ in recorder.calls)
        assert (read["likeliest"] > 1) == few, beside  # once for its prompt, which is a call of its own


def test_likeliest_tokens_of_a_decoder_are_those_of_its_logits(tmp_path: Path) -> None:
    """Read them after a chunk of a prompt, and in a step of three rows, one of them unused."""
    result = export_decoder(make_decoder("llama"), tmp_path, 64)
    plain = fuse(result.graph, tmp_path / "plain")
    graph = finding_likeliest(fuse(result.graph, tmp_path))
    geometry = geometry_of(result.caches, 3, 64, VOCABULARY)
    executor, other = (InProcess(one.path, geometry, Session(threads=1)) for one in (graph, plain))
    assert (executor.has_likeliest, other.has_likeliest) == (True, False)
    first, second = prompts()[0], prompts()[2]
    steps = np.array([[7], [0], [8]]), np.array([len(first), 0, len(second)]), np.array([2, 0])
    for part in (
        CallPart(0, np.array([first]), np.array([0])),
        CallPart(2, np.array([second]), np.array([0]), np.array([4, 0, 7, 1, 2])),  # more than there are slots
        CallPart(0, *steps),
    ):
        logits = torch.from_numpy(other.run(*part).copy())
        for count in (1, 16, 2 * VOCABULARY):
            found = executor.likeliest(part, count)
            values, tokens = logits.topk(min(count, VOCABULARY))
            np.testing.assert_allclose(found.logits, values, atol=1e-5)
            np.testing.assert_array_equal(found.tokens, tokens)
            np.testing.assert_allclose(found.totals, logits.logsumexp(-1, keepdim=True), atol=1e-5)
        np.testing.assert_allclose(executor.run(*part), logits, atol=1e-5)
