"""Checkpoints that cannot be served correctly are refused, each with its reason."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.checkpoints.model import position_limit
from builder.checkpoints.pooling import Pooler
from builder.checkpoints.resolve import describe, locate, resolve
from builder.checkpoints.sentence_transformers.modules import Normalize, Pooling
from builder.checkpoints.tasks.base import encoder_task
from builder.common.errors import BuilderError, CheckpointError, RepositoryError
from builder.options import make_spec
from scripts.tiny_models import POSITIONS, tiny_model
from tests.embedders import make_embedder
from tests.models import minilm
from tests.seq2seqs import make_seq2seq_checkpoint
from tests.tiny_encoders import make_checkpoint


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(checkpoint(name), tmp_path / name))


def _edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


def _resolve(folder: Path, **options: Any) -> Any:
    return resolve(make_spec(model=str(folder), name="model", **options))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("topics", "text-classification"),
        ("names", "token-classification"),
        ("answers", "question-answering"),
        ("masks", "fill-mask"),
    ],
)
def test_task_is_inferred_from_the_architecture(name: str, task: str, checkpoint: Callable[[str], Path]) -> None:
    assert _resolve(checkpoint(name)).task.name == task


def test_position_limit_reads_a_table_of_a_custom_class() -> None:
    """Regression: texts beyond I-BERT's position table, a custom class, ended in an IndexError."""
    assert position_limit(tiny_model("MASKED_LM", "ibert")) == POSITIONS - 1


def test_sentence_transformer_is_recognised_by_its_modules() -> None:
    resolved = _resolve(minilm())
    assert resolved.task.name == "sentence-similarity"
    assert resolved.max_length == 256
    assert resolved.sentence.after == (Pooling(("mean",)), Normalize())


def test_cross_encoder_is_recognised_by_its_configuration(copy: Callable[[str], Path]) -> None:
    folder = copy("ranks")
    _edit(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    resolved = _resolve(folder)
    assert resolved.task.name == "text-ranking"
    assert encoder_task(resolved.task).parameters(resolved) == {"function": "none"}


def test_missing_head_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match="no head for question-answering: 2 weights would be random"):
        _resolve(checkpoint("topics"), task="question-answering")


def test_unknown_task_error_lists_the_tasks(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match=r"'sentiment' is not known; known are .*text-classification"):
        _resolve(checkpoint("topics"), task="sentiment")


def test_pickled_weights_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("topics")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only as a pickle"):
        _resolve(folder)


def test_missing_weights_tokenizer_or_configuration_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("topics")
    (folder / "tokenizer.json").rename(folder / "elsewhere")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        _resolve(folder)
    _edit(folder / "config.json", model_type="from-the-future")
    with pytest.raises(CheckpointError, match="no configuration that transformers knows"):
        _resolve(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        _resolve(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"model_type": "bert", "num_hidden_layers": -1}',
            "says num_hidden_layers -1; expected a number of",
        ),
        ('{"model_type": "bert", "vocab_size": 0}', "says vocab_size 0"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "."),
        ('{"model_type": "bert", "x": ' + "[" * 100_000, "config.json is nested too deeply"),
        ("[]", "has the JSON type array; expected object"),
    ],
)
def test_absurd_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        locate(make_spec(model=str(tmp_path)).source)


def test_tokenizer_of_another_model_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("topics")
    shutil.copy(minilm() / "tokenizer.json", folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match="do not belong together"):
        _resolve(folder)


@pytest.mark.parametrize("labels", [{"0": "a", "1": "b", "2": "a"}, {"0": "a", "1": "b", "3": "c"}])
def test_label_map_that_does_not_match_is_refused(labels: dict[str, str], copy: Callable[[str], Path]) -> None:
    folder = copy("topics")
    _edit(folder / "config.json", id2label=labels)
    resolved = _resolve(folder)
    with pytest.raises(CheckpointError, match="id2label"):
        encoder_task(resolved.task).parameters(resolved)


def test_weights_that_transformers_does_not_read_are_ignored(copy: Callable[[str], Path]) -> None:
    """Regression: weights of another format, consolidated.safetensors, were widened to fp32 too."""
    folder = copy("topics")
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    source = make_spec(model=str(folder)).source
    assert [file.name for file in locate(source).weights] == ["model.safetensors"]
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in locate(source).weights] == ["model-00001-of-00001.safetensors"]


def test_special_tokens_that_are_to_be_split_are_refused(copy: Callable[[str], Path]) -> None:
    """Regression: transformers reads "[MASK]" in a text as text; the emitted code read it as the token."""
    folder = copy("masks")
    _edit(folder / "tokenizer_config.json", split_special_tokens=True)
    with pytest.raises(CheckpointError, match="says split_special_tokens: special tokens in a text would be text"):
        _resolve(folder)


def test_adapter_beside_weights_is_refused(copy: Callable[[str], Path]) -> None:
    """The intended model is ambiguous: transformers applies the adapter only if peft is installed."""
    folder = copy("topics")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base", "r": 8}))
    with pytest.raises(CheckpointError, match=r"has an adapter \(adapter_config.json\).*merge_and_unload"):
        _resolve(folder)


def test_weights_that_do_not_fit_the_configuration_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("topics")
    _edit(folder / "config.json", id2label={"0": "a", "1": "b", "2": "c", "3": "d"})
    with pytest.raises(CheckpointError, match="must belong together"):
        _resolve(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "model.safetensors of .* is damaged.*download it again"),
        (lambda content: content[:-100], "model.safetensors of .* is damaged.*download it again"),
        (lambda content: content[:8] + b"{{" + content[10:], "model.safetensors of .* is damaged"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1\noid", "model.safetensors .*run git lfs pull"),
    ],
)
def test_damaged_weights_are_refused_by_their_file(
    damage: Callable[[bytes], bytes], message: str, copy: Callable[[str], Path]
) -> None:
    """Regression: the message blamed config.json and the task instead of the file."""
    file = copy("topics") / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        _resolve(file.parent)


def test_missing_or_damaged_shard_is_refused_by_its_file(copy: Callable[[str], Path]) -> None:
    folder = copy("topics")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"{shard.name} of .* is damaged"):
        _resolve(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"has no {shard.name}, which model.safetensors.index.json names"):
        _resolve(folder)


def test_task_without_a_class_for_the_architecture_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "nomic", "nomic_bert", "fill-mask")
    _edit(folder / "config.json", model_type="vit", architectures=["ViTForImageClassification"])
    with pytest.raises(CheckpointError, match="does not load for fill-mask: transformers has no class of vit"):
        _resolve(folder, task="fill-mask")
    with pytest.raises(CheckpointError, match="no task here fits a checkpoint of ViTForImageClassification"):
        _resolve(folder)


def test_zero_shot_needs_an_entailment_label(checkpoint: Callable[[str], Path]) -> None:
    resolved = _resolve(checkpoint("topics"), task="zero-shot-classification")
    with pytest.raises(CheckpointError, match="a label 'entailment'; this one has sport, food, travel"):
        encoder_task(resolved.task).parameters(resolved)


def test_ranking_needs_one_output(checkpoint: Callable[[str], Path]) -> None:
    resolved = _resolve(checkpoint("topics"), task="text-ranking")
    with pytest.raises(CheckpointError, match="one output, a relevance; this one has 3"):
        encoder_task(resolved.task).parameters(resolved)


def test_sentence_similarity_needs_a_pooling(checkpoint: Callable[[str], Path]) -> None:
    resolved = _resolve(checkpoint("features"), task="sentence-similarity")
    with pytest.raises(CheckpointError, match="--pooling cls or mean"):
        encoder_task(resolved.task).parameters(resolved)


def test_lengths_come_from_positions_counted_after_the_padding_index(
    checkpoint: Callable[[str], Path],
) -> None:
    """RoBERTa's 514 positions hold 513 tokens if the padding index is 0; the tokeniser's limit is 512."""
    assert _resolve(checkpoint("entail")).max_length == 512
    with pytest.raises(CheckpointError, match="exceeds the 513 positions"):
        _resolve(checkpoint("entail"), max_length=514)
    assert _resolve(checkpoint("entail"), max_length=100).max_length == 100


def test_embedder_of_long_texts_reads_8192_tokens_unless_asked(tmp_path: Path) -> None:
    """A build compares rows of the longest length with PyTorch, whose memory is quadratic in it."""
    folder = make_embedder(tmp_path / "embedder", "qwen3", "lasttoken", max_position_embeddings=32_768)
    _edit(folder / "tokenizer_config.json", model_max_length=32_768)
    _edit(folder / "sentence_bert_config.json", max_seq_length=None)
    assert _resolve(folder).max_length == 8192
    assert _resolve(folder, max_length=16_384).max_length == 16_384
    _edit(folder / "tokenizer_config.json", model_max_length=1024)
    assert _resolve(folder).max_length == 1024


def test_unsupported_sentence_transformers_module_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(minilm(), tmp_path / "model"))
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.LSTM"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"has a module sentence_transformers\.models\.LSTM at place 2"):
        _resolve(folder)


def _process_wide() -> dict[str, Any]:
    """Return the process-wide state of logging, warnings and progress bars."""
    return {
        "disabled": logging.root.manager.disable,
        "root": (logging.root.level, list(logging.root.handlers)),
        "warnings": list(warnings.filters),
        "transformers": (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()),
        "progress bars of the Hub disabled": are_progress_bars_disabled(),
    }


def test_quiet_libraries_restores_logging_and_warnings() -> None:
    before = _process_wide()
    with quiet_libraries():
        within = _process_wide()
        warnings.warn("not heard", stacklevel=1)
    with pytest.raises(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)
    assert (within["disabled"], within["transformers"]) == (logging.WARNING, (logging.ERROR, False))
    assert within["progress bars of the Hub disabled"]
    assert _process_wide() == before


def test_importing_the_builder_configures_no_logging() -> None:
    """ONNX Runtime's weight quantiser calls logging.basicConfig at import."""
    script = (
        "import logging, onnx; from builder.engines.optimise.weights import blockwise;"
        "from builder.options import WeightOptions;"
        "graph = onnx.helper.make_graph([], 'g', [], []);"
        "blockwise(onnx.helper.make_model(graph), 8, WeightOptions(32, True), 4);"
        "assert (logging.root.level, logging.root.handlers) == (logging.WARNING, []), logging.root.handlers"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


def test_build_of_another_checkpoint_needs_a_name(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Regression: a checkpoint from a folder of another name was refused despite --name.

    Without --name it still is, and a folder that was not built here is never overwritten.
    """
    before = _process_wide()
    repository, other = tmp_path / "r", tmp_path / "retrained" / "model"
    build(make_spec(model=str(checkpoint("topics")), name="model", output=repository))
    assert _process_wide() == before, "a build from Python silences and configures nothing"
    files = {p: p.read_bytes() for p in repository.rglob("*") if p.is_file()}
    shutil.copytree(checkpoint("flags"), other)
    with pytest.raises(RepositoryError, match=r"a model model, built from topics-checkpoint;.*--name model"):
        build(make_spec(model=str(other), output=repository))
    assert {p: p.read_bytes() for p in repository.rglob("*") if p.is_file()} == files

    report = build(make_spec(model=str(checkpoint("flags")), name="model", output=repository))
    assert (report.version, report.checkpoint["source"]) == (2, "flags-checkpoint")

    (repository / "other").mkdir()
    with pytest.raises(RepositoryError, match="a model other, built from something else than build-repo"):
        build(make_spec(model=str(other), name="other", output=repository))


def test_next_version_of_a_hosted_model_goes_to_its_repository(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    hosting = tmp_path / "r" / "news" / "models"
    (hosting / "sport").mkdir(parents=True)
    (hosting / "hosted.json").write_text("{}")
    with pytest.raises(RepositoryError, match=f"news hosts sport: its versions are in the repository {hosting}, "):
        build(make_spec(model=str(checkpoint("topics")), name="sport", output=tmp_path / "r"))
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["news"]


def test_hub_id_is_resolved_to_its_commit_from_the_cache(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the cache layout of a download from the Hub, without a network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "models--org--topics"
    shutil.copytree(checkpoint("topics"), cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    resolved = resolve(make_spec(model="org/topics"))
    assert (resolved.source, resolved.revision) == ("org/topics", commit)


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken"])
def test_pooling_ignores_padding(mode: str) -> None:
    """A padded row is pooled like the row alone."""
    torch.manual_seed(0)
    features = torch.randn(2, 7, 5)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    pooled = Pooler((mode,))(features, mask)
    alone = Pooler((mode,))(features[1:, :4], mask[1:, :4])
    torch.testing.assert_close(pooled[1:], alone)
    expected = {"cls": features[0, 0], "mean": features[0].mean(0), "max": features[0].max(0).values}
    if mode in expected:
        torch.testing.assert_close(pooled[0], expected[mode])


def test_every_error_is_a_builder_error(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "bert", "fill-mask")
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(BuilderError, match="does not load"):
        _resolve(folder)


def test_generation_options_in_an_old_config_json_are_read(tmp_path: Path) -> None:
    """Regression: plans and packed checkpoints ignored these options, which transformers reads from config.json."""
    folder = make_seq2seq_checkpoint(tmp_path / "bart", "bart")
    (folder / "generation_config.json").unlink()
    _edit(folder / "config.json", num_beams=4, max_length=50)
    spec = make_spec(model=str(folder), name="m")
    for checkpoint in (resolve(spec), describe(spec.source)):
        config = checkpoint.model.generation_config
        assert (config.num_beams, config.max_length) == (4, 50)


@pytest.mark.parametrize(
    ("model_type", "task", "expected"),
    [
        ("bart", None, "text2text-generation"),
        ("t5", None, "text2text-generation"),
        ("bart", "fill-mask", "fill-mask"),
        ("t5", "summarization", "summarization"),
        ("mbart", "translation_en_to_ro", "translation"),
    ],
)
def test_task_of_an_encoder_decoder_is_inferred(
    model_type: str, task: str | None, expected: str, tmp_path: Path
) -> None:
    folder = make_seq2seq_checkpoint(tmp_path / "checkpoint", model_type)
    assert resolve(make_spec(model=str(folder), name="m", task=task, max_length=32)).task.name == expected
