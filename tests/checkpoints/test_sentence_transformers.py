"""Checkpoints of sentence-transformers 2 to 6 are read as the library reads them, or refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense as DenseModule
from sentence_transformers.base.modules import Normalize as NormalizeModule
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, WeightedLayerPooling
from transformers import AutoConfig, T5EncoderModel, T5Model

from builder.building.variants.evaluator import make_evaluator
from builder.building.verify.parity import error_at, reference
from builder.checkpoints.pooling import Pooler
from builder.checkpoints.resolve import resolve
from builder.checkpoints.sentence_transformers import read_modules
from builder.checkpoints.sentence_transformers.chain import ModuleFolder
from builder.checkpoints.sentence_transformers.modules import Dense, read_module
from builder.checkpoints.sentence_transformers.transformer import read_in_lower_case
from builder.checkpoints.tasks.base import encoder_task
from builder.checkpoints.tasks.feature_extraction import FeatureExtraction
from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS
from builder.engines import infer_with
from builder.graphs.export.encoder import export
from builder.graphs.export.rows import rows_of
from builder.graphs.onnx.graph import Graph
from builder.options import make_spec
from tests.fronts import answers, front_over_pytorch
from tests.seq2seqs import SPECIAL, T5
from tests.tiny_encoders import VOCABULARY, make_checkpoint, make_tokenizer

PAIRS = ("the train leaves at nine", ["the museum is closed", "a fox"])


def _write(path: Path, document: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))


def _edit(path: Path, **changes: Any) -> None:
    _write(path, {**json.loads(path.read_text()), **changes})


@pytest.fixture(scope="module")
def embedder(module_folder: Callable[[str], Path]) -> Path:
    """Create a tiny BERT with a modules.json of mean pooling only."""
    folder = make_checkpoint(module_folder("sentence") / "embedder", "bert", "feature-extraction")
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    _write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(kinds.items())
        ],
    )
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    return folder


@pytest.fixture
def copy(embedder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedder, tmp_path / "embedder"))


def _modules(folder: Path, *kinds: tuple[str, str]) -> None:
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": kind} for index, (path, kind) in enumerate(kinds)
    ]
    _write(folder / "modules.json", modules)


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("max", "mean")),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, ("cls", "lasttoken")),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, ("mean_sqrt_len",)),
        ({"pooling_mode_mean_tokens": False}, ("mean",)),
    ],
)
def test_pooling_concatenates_modes_like_sentence_transformers(
    config: dict[str, Any], modes: tuple[str, ...], copy: Path
) -> None:
    _write(copy / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **config})
    sentence = read_modules(copy)
    assert sentence is not None
    assert sentence.pooling is not None
    assert sentence.pooling.modes == modes
    theirs = SentenceTransformer(str(copy), device="cpu").encode("the train leaves at nine")
    spec = make_spec(model=str(copy))
    checkpoint = resolve(spec)
    ours = encoder_task(checkpoint.task).reference(checkpoint, {"text_input": "the train leaves at nine"})
    np.testing.assert_allclose(ours["embedding"], theirs, atol=1e-5)


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "1_Pooling/../../elsewhere"])
def test_module_outside_the_checkpoint_is_refused(path: str, copy: Path) -> None:
    _modules(copy, ("", "sentence_transformers.models.Transformer"), (path, "sentence_transformers.models.Pooling"))
    with pytest.raises(CheckpointError, match=r"a module at .*; expected the name of a folder"):
        read_modules(copy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "modules.json has the JSON type object; expected array"),
        ('["Transformer"]', "module 0 of modules.json is Transformer; expected a mapping with a type and a path"),
        ('[{"type": 3, "path": ""}]', "module 0 of modules.json is "),
        ("[" * 100_000, "modules.json is nested too deeply"),
        ("[{", "modules.json cannot be read as JSON"),
    ],
)
def test_modules_that_are_malformed_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_modules(tmp_path)


@pytest.mark.parametrize("config", [{}, {"in_features": "x", "out_features": 4}, {"in_features": 9, "out_features": 4}])
def test_dense_module_with_invalid_settings_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    _write(tmp_path / "2_Dense" / "config.json", config)
    save_file({"linear.weight": torch.eye(4), "linear.bias": torch.zeros(4)}, tmp_path / "2_Dense/model.safetensors")
    with pytest.raises(CheckpointError, match="do not make a Dense"):
        Pooler(("mean",), (Dense(tmp_path / "2_Dense"),))


def test_module_with_code_of_the_checkpoint_is_refused(copy: Path) -> None:
    _modules(copy, ("", "custom_st.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling"))
    with pytest.raises(CheckpointError, match=r"a module custom_st\.Transformer at place 0"):
        read_modules(copy)


def test_prompts_that_are_not_a_mapping_are_refused(copy: Path) -> None:
    _write(copy / "config_sentence_transformers.json", {"prompts": ["query: "]})
    with pytest.raises(CheckpointError, match=r"prompts is .*; expected a mapping"):
        read_modules(copy)


@pytest.mark.parametrize("order", [("Pooling", "Transformer"), ("Transformer", "Dense", "Pooling"), ("Transformer",)])
def test_modules_in_another_order_are_refused(order: tuple[str, ...], copy: Path) -> None:
    _modules(copy, *((f"{i}", f"sentence_transformers.models.{kind}") for i, kind in enumerate(order)))
    with pytest.raises(CheckpointError, match=f"is a SentenceTransformer of {', '.join(order)}"):
        read_modules(copy)


def test_sparse_encoder_is_refused_by_name(copy: Path) -> None:
    _write(copy / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    with pytest.raises(CheckpointError, match="is a SparseEncoder of Transformer, Pooling"):
        read_modules(copy)


@pytest.mark.parametrize(
    "config", [{"use_residual": True}, {"module_input_name": "token_embeddings"}, {"module_output_name": ["x"]}]
)
def test_dense_module_with_residual_or_partial_input_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    _write(tmp_path / "2_Dense" / "config.json", {"in_features": 4, "out_features": 4, **config})
    save_file({"linear.weight": torch.eye(4), "linear.bias": torch.zeros(4)}, tmp_path / "2_Dense/model.safetensors")
    with pytest.raises(CheckpointError, match="a residual, or not of the whole embedding"):
        read_module(ModuleFolder("Dense", tmp_path / "2_Dense"), "embedder")


def test_dense_module_without_an_activation_uses_tanh(tmp_path: Path) -> None:
    _write(tmp_path / "2_Dense" / "config.json", {"in_features": 4, "out_features": 4})
    save_file({"linear.weight": torch.eye(4), "linear.bias": torch.zeros(4)}, tmp_path / "2_Dense/model.safetensors")
    features = torch.ones(1, 1, 4)
    pooled = Pooler(("mean",), (Dense(tmp_path / "2_Dense"),))(features, torch.ones(1, 1, dtype=torch.long))
    torch.testing.assert_close(pooled, torch.tanh(features[:, 0]))


def test_layer_norm_after_dense_equals_sentence_transformers(copy: Path) -> None:
    torch.manual_seed(0)
    modules = [Transformer(str(copy)), Pooling(32, "mean"), DenseModule(32, 8), LayerNorm(8), NormalizeModule()]
    torch.nn.init.normal_(modules[3].norm.weight)
    folder = copy.parent / "saved"
    library = SentenceTransformer(modules=modules, device="cpu")
    library.save_pretrained(str(folder))
    checkpoint = resolve(make_spec(model=str(folder)))
    for text in TEXTS[:4]:
        ours = encoder_task(checkpoint.task).reference(checkpoint, {"text_input": text})
        np.testing.assert_allclose(ours["embedding"], library.encode(text), atol=1e-6)


@pytest.fixture
def weighted(copy: Path, tmp_path: Path) -> Path:
    """Save an embedder of which a token is the weighted mean of layers."""
    _edit(copy / "config.json", output_hidden_states=True)
    layers = WeightedLayerPooling(32, num_hidden_layers=2, layer_start=1)
    layers.layer_weights = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
    modules = [Transformer(str(copy)), layers, Pooling(32, "mean"), NormalizeModule()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "weighted"))
    return tmp_path / "weighted"


def test_weighted_layers_equal_sentence_transformers(weighted: Path, tmp_path: Path) -> None:
    expected = SentenceTransformer(str(weighted), device="cpu").encode(list(TEXTS[:4]))
    spec = make_spec(model=str(weighted))
    checkpoint = resolve(spec)
    samples = [{"text_input": text} for text in TEXTS[:4]]
    found = [one["embedding"] for one in answers(front_over_pytorch(checkpoint, spec, tmp_path), checkpoint, samples)]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    references = [encoder_task(checkpoint.task).reference(checkpoint, sample)["embedding"] for sample in samples]
    np.testing.assert_allclose(references, expected, atol=1e-6)
    exported = export(checkpoint, tmp_path / "graph")
    assert (exported.attentions, exported.warning) == (2, None)
    rows = rows_of(checkpoint)
    row = reference(exported.module, rows, [17])
    assert error_at(infer_with(exported.graph, 1), exported.graph, row, True) < 1e-5


def test_weighted_layers_that_would_be_left_out_are_refused(weighted: Path) -> None:
    _edit(weighted / "config.json", output_hidden_states=False)
    checkpoint = resolve(make_spec(model=str(weighted)))
    with pytest.raises(CheckpointError, match="Set output_hidden_states to true"):
        encoder_task(checkpoint.task).parameters(checkpoint)
    _edit(weighted / "config.json", output_hidden_states=True)
    _edit(weighted / "1_WeightedLayerPooling" / "config.json", layer_start=0)
    checkpoint = resolve(make_spec(model=str(weighted)))
    with pytest.raises(CheckpointError, match="layer_weights for 3 layers from 0 on"):
        encoder_task(checkpoint.task).parameters(checkpoint)


def test_pooling_option_keeps_the_layers_after_pooling(copy: Path) -> None:
    """Regression: with the checkpoint's own pooling, the Dense layer and the truncation were skipped."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"))
    _modules(copy, *((path, f"sentence_transformers.models.{kind}") for path, kind in kinds))
    _write(copy / "2_Dense" / "config.json", {"in_features": 32, "out_features": 8})
    save_file({"linear.weight": torch.ones(8, 32), "linear.bias": torch.zeros(8)}, copy / "2_Dense/model.safetensors")
    _write(copy / "config_sentence_transformers.json", {"truncate_dim": 5})
    checkpoint = resolve(make_spec(model=str(copy), pooling="cls"))
    pooler = FeatureExtraction().pooler(checkpoint)
    assert pooler is not None
    features = torch.zeros(1, 3, 32)
    features[0, 0] = 1.0
    assert pooler(features, torch.ones(1, 3, dtype=torch.long)).tolist() == [[1.0] * 5], "tanh of 32"
    _write(copy / "1_Pooling" / "config.json", {"pooling_mode": ["cls", "mean"]})
    with pytest.raises(CheckpointError, match="takes cls and mean, one after the other; leave --pooling out"):
        FeatureExtraction().pooler(resolve(make_spec(model=str(copy), pooling="cls")))


def test_embedding_is_truncated_to_the_size_of_the_checkpoint(copy: Path, tmp_path: Path) -> None:
    _write(copy / "config_sentence_transformers.json", {"truncate_dim": 5})
    spec = make_spec(model=str(copy))
    checkpoint = resolve(spec)
    (answer,) = answers(front_over_pytorch(checkpoint, spec, tmp_path), checkpoint, [{"text_input": "a fox"}])
    assert len(answer["embedding"]) == 5


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_settings_of_earlier_releases_are_read(name: str, copy: Path) -> None:
    _write(copy / name, {"max_seq_length": 40, "do_lower_case": True})
    sentence = read_modules(copy)
    assert sentence is not None
    assert (sentence.max_length, sentence.lower_case) == (40, True)
    _write(copy / name, {"max_seq_length": 40, "query_expansion": {"strategy": "fixed"}})
    with pytest.raises(CheckpointError, match="sets query_expansion"):
        read_modules(copy)


def test_lower_casing_skips_special_tokens_in_texts(copy: Path, tmp_path: Path) -> None:
    """Regression: special tokens in a text were lower-cased too, and tokenised as plain text."""
    document = json.loads((copy / "tokenizer.json").read_text())
    document["normalizer"]["lowercase"] = False
    _write(copy / "tokenizer.json", document)
    _write(copy / "sentence_bert_config.json", {"do_lower_case": True})
    spec = make_spec(model=str(copy))
    checkpoint = resolve(spec)
    samples = [{"text_input": text} for text in ("A FOX [SEP] Fox", "a fox [SEP] fox", "a fox [sep] fox")]
    ids = checkpoint.tokenizer(samples[0]["text_input"])["input_ids"]
    assert ids.count(checkpoint.tokenizer.sep_token_id) == 2
    first, same, other = (
        np.array(a["embedding"]) for a in answers(front_over_pytorch(checkpoint, spec, tmp_path), checkpoint, samples)
    )
    np.testing.assert_allclose(first, same, atol=1e-5)
    assert np.abs(first - other).max() > 1e-3
    cased = make_tokenizer("unigram", type_ids=False)
    read_in_lower_case(cased)
    read_in_lower_case(cased)
    assert cased("THE Train")["input_ids"] == cased("the train")["input_ids"]
    assert len(list(cased.backend_tokenizer.normalizer)) == 1, "once is enough"


TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config_args": {"is_decoder": True}}, r"with is_decoder True \(config_kwargs\)"),
        ({"config_kwargs": {"rope_theta": 5.0}}, "with rope_theta 5.0"),
        ({"model_args": {"ignore_mismatched_sizes": True}}, "with ignore_mismatched_sizes True"),
        ({"tokenizer_args": {"model_max_length": 40, "truncation_side": "left"}}, "with truncation_side 'left'"),
        ({"processor_kwargs": {"add_eos_token": True}}, "with add_eos_token True"),
        ({"transformer_task": "fill-mask"}, "loaded for fill-mask; known is last_hidden_state of forward"),
        ({"modality_config": {"text": {**TEXT, "method_output_name": "pooler_output"}}}, "reads .'pooler_output'."),
        ({"modality_config": {"text": {**TEXT, "method": "get_text_features"}}}, "get_text_features for texts"),
        ({"modality_config": {"text": TEXT, "message": TEXT}}, "puts texts into its chat template"),
        ({"modality_config": {"image": TEXT}}, "reads None of its transformer's None"),
        ({"model_args": "x"}, "its setting model_args is 'x'; expected a mapping"),
        ({"processor_kwargs": [40]}, "processor_kwargs is .* expected a mapping"),
        ({"modality_config": ["text"]}, "modality_config is .* expected a mapping"),
        ({"modality_config": {"text": "forward"}}, "text is 'forward'; expected a mapping"),
    ],
)
def test_settings_that_would_change_answers_are_refused(settings: dict[str, Any], message: str, copy: Path) -> None:
    """Regression: these settings were ignored, and the model answered without them."""
    _write(copy / "sentence_bert_config.json", settings)
    with pytest.raises(CheckpointError, match=message):
        read_modules(copy)


def test_settings_that_change_no_answer_are_accepted(copy: Path) -> None:
    loaded = {"model_args": {"torch_dtype": "float16", "trust_remote_code": True}, "config_args": {"use_cache": False}}
    read = {"transformer_task": "feature-extraction", "modality_config": {"text": TEXT}}
    limit = {"tokenizer_args": {"model_max_length": 40, "padding_side": "left"}}
    _write(copy / "sentence_bert_config.json", {**loaded, **read, **limit})
    sentence = read_modules(copy)
    assert sentence is not None
    assert sentence.max_length == 40


@pytest.mark.parametrize(
    "settings",
    [
        {"model_args": {"low_cpu_mem_usage": True}},
        {"model_kwargs": {"use_safetensors": True}},
        {"tokenizer_args": {"clean_up_tokenization_spaces": True}},
        {"model_kwargs": {"quantization_config": None}},
        {"processor_kwargs": {"add_eos_token": None}},
        {"config_args": {"rope_theta": None}},
    ],
)
def test_arguments_that_change_no_answer_are_accepted(settings: dict[str, Any], copy: Path) -> None:
    """Regression: these arguments caused a refusal."""
    _write(copy / "sentence_bert_config.json", settings)
    assert read_modules(copy) is not None


def test_normalize_of_another_output_is_refused(copy: Path) -> None:
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    _modules(copy, *((path, f"sentence_transformers.models.{kind}") for path, kind in kinds))
    for name in ("sentence_embedding", "token_embeddings"):
        _write(copy / "2_Normalize" / "config.json", {"module_input_name": name})
        if name == "sentence_embedding":
            assert read_modules(copy)
    with pytest.raises(CheckpointError, match="normalises token_embeddings"):
        read_modules(copy)
    _write(copy / "2_Normalize" / "config.json", {"module_input_name": ["sentence_embedding"]})
    with pytest.raises(CheckpointError, match=r"normalises \['sentence_embedding'\]"):
        read_modules(copy)


@pytest.mark.parametrize(("limit", "tokens"), [(24, 24), (None, 16), (900, 514)])
def test_limit_of_the_checkpoint_precedes_the_tokenizers(limit: int | None, tokens: int, copy: Path) -> None:
    """Regression: a text of 20 tokens was cut to the tokeniser's 16; sentence-transformers overrides that limit."""
    _edit(copy / "tokenizer_config.json", model_max_length=16)
    _write(copy / "sentence_bert_config.json", {"max_seq_length": limit, "do_lower_case": False})
    assert resolve(make_spec(model=str(copy))).max_length == tokens


def test_empty_default_prompt_adds_nothing(copy: Path, tmp_path: Path) -> None:
    """Regression: the empty prompt was dropped, and every request was refused because it was missing."""
    prompts = {"query": "query: ", "document": ""}
    _write(copy / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "document"})
    spec = make_spec(model=str(copy))
    checkpoint = resolve(spec)
    front = front_over_pytorch(checkpoint, spec, tmp_path)
    samples = [{"text_input": "a fox"}, {"text_input": "a fox", "prompt_name": "query"}, {"text_input": "query: a fox"}]
    plain, query, spelled = (np.array(a["embedding"]) for a in answers(front, checkpoint, samples))
    np.testing.assert_allclose(query, spelled, atol=1e-5)
    assert np.abs(plain - query).max() > 1e-3
    _edit(copy / "config_sentence_transformers.json", default_prompt_name="passage")
    with pytest.raises(CheckpointError, match="a default prompt 'passage', which is not one of its prompts"):
        read_modules(copy)


def test_default_prompt_applies_to_samples(copy: Path, tmp_path: Path) -> None:
    """The longest sample fits only without the prompt, and is skipped."""
    spec = make_spec(model=str(copy))
    longest = max(len(resolve(spec).tokenizer(s["text_input"])["input_ids"]) for s in resolve(spec).task.samples)
    _write(copy / "sentence_bert_config.json", {"max_seq_length": longest})
    _write(
        copy / "config_sentence_transformers.json",
        {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
    )
    checkpoint = resolve(spec)
    module = encoder_task(checkpoint.task).graph(checkpoint, ("input_ids", "attention_mask"))
    graph = Graph(tmp_path, module.inputs, module.outputs, (), 20, 9, Counter(), 0)
    bench = make_evaluator(spec, checkpoint, module, graph, tmp_path)
    assert 0 < len(bench.samples) < len(checkpoint.task.samples)


@pytest.mark.parametrize("whole", [False, True], ids=["the encoder's weights", "the whole model's"])
def test_embedder_of_an_encoder_decoder_uses_its_encoder(whole: bool, copy: Path, tmp_path: Path) -> None:
    """Regression: sentence-t5 and gtr-t5 ended in a traceback, because the full T5 model requires decoder inputs."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("t5", vocab_size=VOCABULARY, **SPECIAL, **T5)
    (T5Model if whole else T5EncoderModel)(config).save_pretrained(copy)
    make_tokenizer("unigram", type_ids=False).save_pretrained(copy)
    _write(copy / "2_Normalize" / "config.json", {})
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    _modules(copy, *((path, f"sentence_transformers.models.{kind}") for path, kind in kinds))
    checkpoint = resolve(make_spec(model=str(copy), max_length=64))
    assert checkpoint.task.name == "sentence-similarity"
    spec = make_spec(model=str(copy), max_length=64)
    front = front_over_pytorch(checkpoint, spec, tmp_path)
    found = [one["embedding"] for one in answers(front, checkpoint, [{"text_input": text} for text in TEXTS[:6]])]
    wanted = SentenceTransformer(str(copy), device="cpu").encode(list(TEXTS[:6]))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.fixture(scope="module")
def ranker(module_folder: Callable[[str], Path]) -> Path:
    folder = module_folder("ranker") / "ranker"
    return make_checkpoint(folder, "bert", "text-ranking", {0: "relevance"})


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "before 4.0": ({"sbert_ce_default_activation_function": IDENTITY}, "identity"),
    "before 4.0, sigmoid": ({"sbert_ce_default_activation_function": SIGMOID}, "sigmoid"),
    "from 4.0": ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}, "identity"),
    "both": (
        {"sentence_transformers": {"activation_fn": SIGMOID}, "sbert_ce_default_activation_function": IDENTITY},
        "sigmoid",
    ),
    "both, the newer without one": (
        {"sentence_transformers": {"version": "4.1.0"}, "sbert_ce_default_activation_function": IDENTITY},
        "identity",
    ),
    "none said": ({"sentence_transformers": {"version": "4.1.0"}}, "sigmoid"),
}


@pytest.mark.parametrize("source", [*PLACES, "from 6"])
def test_cross_encoder_scores_with_its_own_activation(source: str, ranker: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ranker, tmp_path / "ranker"))
    changes, expected = PLACES.get(source, ({}, "identity"))
    _edit(folder / "config.json", **changes)
    if source == "from 6":
        _modules(folder, ("", "sentence_transformers.base.modules.transformer.Transformer"))
        _write(folder / "sentence_bert_config.json", {"transformer_task": "sequence-classification"})
        general = {"model_type": "CrossEncoder", "activation_fn": IDENTITY}
        _write(folder / "config_sentence_transformers.json", general)
    spec = make_spec(model=str(folder))
    checkpoint = resolve(spec)
    assert checkpoint.task.name == "text-ranking"
    sample = {"query": PAIRS[0], "documents": PAIRS[1]}
    (answer,) = answers(front_over_pytorch(checkpoint, spec, tmp_path), checkpoint, [sample])
    with torch.no_grad():
        encoded = [checkpoint.tokenizer(PAIRS[0], document, return_tensors="pt") for document in PAIRS[1]]
        logits = torch.cat([checkpoint.model(**e).logits[0] for e in encoded])
    scores = torch.sigmoid(logits) if expected == "sigmoid" else logits
    np.testing.assert_allclose(answer["score"], scores, rtol=1e-5, atol=1e-6)
    theirs = CrossEncoder(str(folder), device="cpu").predict([(PAIRS[0], d) for d in PAIRS[1]])
    np.testing.assert_allclose(answer["score"], theirs, rtol=1e-4, atol=1e-5)


def test_unknown_activation_is_refused(ranker: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ranker, tmp_path / "ranker"))
    _edit(folder / "config.json", sentence_transformers={"activation_fn": "my_code.Softplus"})
    checkpoint = resolve(make_spec(model=str(folder)))
    with pytest.raises(CheckpointError, match=r"activation my_code\.Softplus is not known"):
        encoder_task(checkpoint.task).parameters(checkpoint)


def test_cross_encoder_with_several_labels_is_a_classifier(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("topics"), tmp_path / "topics"))
    _edit(folder / "config.json", sbert_ce_default_activation_function=IDENTITY)
    assert resolve(make_spec(model=str(folder))).task.name == "text-classification"
