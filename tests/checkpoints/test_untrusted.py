"""Malicious checkpoints are refused in one line that names the attack."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedConfig
from transformers.integrations import hub_kernels
from transformers.utils.sentencepiece_model_pb2_new import ModelProto

from builder.building.families import code_not_run
from builder.building.keys import build_key
from builder.checkpoints.model import read_configuration
from builder.checkpoints.resolve import locate, resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.checkpoints.tokenizer import load_tokenizer
from builder.checkpoints.tokenizer_limits import panics_refused
from builder.common import limited
from builder.common.errors import BuilderError, CheckpointError, SpecError
from builder.options import make_spec


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """Copy a valid checkpoint, which tests modify."""
    return Path(shutil.copytree(checkpoint("topics"), tmp_path / "topics"))


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _refused(folder: Path, message: str, act: Callable[..., Any] = locate) -> None:
    with pytest.raises(BuilderError, match=message) as caught:
        act(make_spec(model=str(folder), name="model"))
    assert "\n" not in str(caught.value)


def test_valid_checkpoint_is_accepted(folder: Path) -> None:
    assert resolve(make_spec(model=str(folder), name="model")).task.name == "text-classification"


def _header(tensors: Any, length: int | None = None) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(64)


def _tensor(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        _header({}, 1 << 63),
        _header({}, (1 << 64) - 1),
        _header({"a": _tensor(0, 8), "b": _tensor(4, 12)}),
        _header({"a": _tensor(-8, 0)}),
        _header({"a": _tensor(8, 0)}),
        _header({"a": _tensor(0, 1 << 40)}),
        _header({"a": _tensor(0, 8, [1 << 62, 1 << 62])}),
        _header({"a": _tensor(0, 8, [-2])}),
        _header({"a": _tensor(0, 8, dtype="O")}),
        _header(b"[" * 100_000),
        _header(b"\xff\xfe"),
        b"",
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    ],
    ids=[
        "length 2^63",
        "length 2^64 - 1",
        "overlapping",
        "negative",
        "backwards",
        "beyond the file",
        "shape that overflows",
        "negative shape",
        "objects",
        "deep",
        "not UTF-8",
        "empty",
        "a pickle",
    ],
)
def test_malformed_safetensors_headers_are_refused(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    _refused(folder, "model.safetensors of .* is damaged", resolve)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/model.safetensors"])
def test_index_with_files_elsewhere_is_refused(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    _refused(folder, f"index.json names {name!r}; expected names of files beside it")


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "tokenizer.json", "sub/notes.txt"])
def test_links_out_of_the_checkpoint_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    _refused(folder, f"{name} is a link out of the checkpoint, to .*secret; put a copy")


def test_links_within_a_checkpoint_or_to_hub_blobs_are_accepted(folder: Path, tmp_path: Path) -> None:
    (folder / "also.json").symlink_to("config.json")
    store = tmp_path / "models--org--name"
    snapshot = Path(shutil.copytree(folder, store / "snapshots" / "0123"))
    (store / "blobs").mkdir()
    (snapshot / "config.json").rename(store / "blobs" / "abc")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    for root in (folder, snapshot, store):
        assert locate(make_spec(model=str(root), name="model").source).source == root.name


@pytest.mark.parametrize("act", [build_key, locate], ids=["key", "locate"])
@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "modules.json", "sub/notes"])
def test_fifos_and_sockets_as_files_are_refused(name: str, act: Callable[..., Any], folder: Path) -> None:
    """Regression: a FIFO blocked the build forever."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    _refused(folder, f"{name} is a FIFO, which is not read", act)
    (folder / name).unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        before = Path.cwd()
        os.chdir((folder / name).parent)  # a socket's path is short
        listening.bind(Path(name).name)
        os.chdir(before)
        _refused(folder, f"{name} is a socket, which is not read", act)


@pytest.mark.parametrize("act", [build_key, locate], ids=["key", "locate"])
def test_links_to_devices_are_refused(act: Callable[..., Any], folder: Path) -> None:
    (folder / "notes.txt").symlink_to("/dev/zero")
    _refused(folder, "notes.txt is a link out of the checkpoint, to /dev/zero", act)


def test_fifo_in_a_nested_folder_does_not_block(folder: Path) -> None:
    (folder / "a/b/c").mkdir(parents=True)
    os.mkfifo(folder / "a/b/c/fifo")
    spec = make_spec(model=str(folder), name="model")
    assert build_key(spec)
    assert locate(spec.source).tokenizer is not None


def test_huge_text_files_are_refused(folder: Path) -> None:
    with (folder / "vocab.txt").open("wb") as stream:
        stream.truncate(100 << 30)  # a sparse file
    _refused(folder, "vocab.txt has 102400 MiB, more than any checkpoint has")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_labels", 10**9),
        ("id2label", {str(number): "x" for number in range(100_001)}),
        ("vocab_size", 1 << 40),
        ("hidden_size", 1e300),
        ("text_config", {"num_hidden_layers": 1 << 62}),
    ],
)
def test_huge_sizes_in_a_configuration_are_refused(field: str, value: Any, folder: Path) -> None:
    _edit(folder / "config.json", **{field: value})
    _refused(folder, r"the config.json of .* says \w+ .*, more than any checkpoint has")


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "..", ".", "", ".hidden", "a\nb", "a\x1b[2J", "-o", "a b", "é", "a\x00"]
)
def test_names_with_paths_or_control_characters_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="is not a model name"):
        make_spec(model="org/name", name=name)


def _tokenizer(folder: Path, **changes: Any) -> None:
    _edit(folder / "tokenizer.json", **changes)


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _sequence(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("pattern", ["a*a*b", r"x*x*\w*y"])
@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_endless_tokenizer_expressions_are_refused(
    part: str, pattern: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.checkpoints.tokenizer_limits.SECONDS", 2)
    normalizer = _sequence(_replace({"Regex": pattern}, "x"))
    _tokenizer(folder, **{part: _split(pattern) if part == "pre_tokenizer" else normalizer})
    _refused(folder, "the tokenizer of .* takes more than 2 s of processor time")


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        (_replace({"String": "a"}, "b" * 10**5), "writes 100000 characters, more than 64, in one place of a text"),
        ({"type": "Prepend", "prepend": "b" * 10**6}, "writes 1000000 characters, more than 64, in one place"),
        (_sequence(*[_replace({"String": "a"}, "aa")] * 8), "writes 256 characters for 'a'"),
        (_sequence(*[_replace({"String": "ab"}, "abab")] * 40), "takes more than .* GiB of memory"),
        (_sequence(*[_replace({"Regex": "ab+"}, "abab")] * 40), "takes more than .* GiB of memory"),
    ],
    ids=["a long replacement", "a long beginning", "a chain", "an endless chain", "an endless chain of expressions"],
)
def test_normalizers_that_multiply_a_text_are_refused(
    normalizer: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a Replace took 3.8 GB of the build's memory, a Prepend 7 GB."""
    monkeypatch.setattr(limited, "MEMORY_LIMIT", 256 << 20)
    _tokenizer(folder, normalizer=normalizer)
    _refused(folder, f"the tokenizer of .* {message}")


def test_added_tokens_with_an_endless_normalizer_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added tokens are normalised when the tokenizer is loaded, before any text."""
    monkeypatch.setattr("builder.checkpoints.tokenizer_limits.SECONDS", 2)
    _tokenizer(folder, normalizer=_replace({"Regex": "(?:xq)*(?:xq)*z"}, "x"))
    token = {"content": "xq" * 2000 + "-z", "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    _edit(folder / "tokenizer_config.json", added_tokens_decoder={"599": {**token, "single_word": False}})
    _refused(folder, "the tokenizer of .* takes more than 2 s of processor time")


def test_charsmap_with_a_long_replacement_is_refused(folder: Path) -> None:
    proto = ModelProto()
    proto.normalizer_spec.precompiled_charsmap = bytes(4) + b"b" * 1000 + b"\0"
    (folder / "spiece.model").write_bytes(proto.SerializeToString())
    _refused(folder, "spiece.model of .* writes 1000 characters, more than 64, in one place of a text")


def test_post_processor_that_repeats_a_text_is_refused(folder: Path) -> None:
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * 500
    _tokenizer(folder, post_processor={"type": "TemplateProcessing", "single": pieces, "pair": pieces,
                                       "special_tokens": {}})  # fmt: skip
    _refused(folder, "the tokenizer of .* makes .* tokens of .* characters")


def test_tokenizer_that_fails_on_ordinary_texts_is_refused(folder: Path) -> None:
    """Regression: an expression that exceeded ten million steps ended the build in a traceback."""
    _tokenizer(folder, pre_tokenizer=_split(r"([\w ]+)+[;@]"))
    _refused(folder, "the tokenizer of .* fails on the text")


def test_tokenizer_that_fails_on_rare_texts_is_accepted(folder: Path) -> None:
    _tokenizer(folder, pre_tokenizer=_split(r"(0+)+[;@]"))
    assert locate(make_spec(model=str(folder), name="model").source).tokenizer is not None


@pytest.mark.parametrize("name", ["../tokenizer.1.json", "/etc/tokenizer.1.json"])
def test_tokenizer_files_elsewhere_are_refused(name: str, folder: Path) -> None:
    """Regression: transformers opened whatever path fast_tokenizer_files names."""
    _edit(folder / "tokenizer_config.json", fast_tokenizer_files=[name])
    _refused(folder, f"tokenizer_config.json of .* names {name!r} .*expected names of files beside it")


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pattern", [GPT_2, CL100K], ids=["GPT-2", "cl100k"])
def test_expressions_of_known_models_are_accepted(pattern: str, folder: Path) -> None:
    _tokenizer(folder, pre_tokenizer=_split(pattern))
    assert locate(make_spec(model=str(folder), name="model").source).tokenizer is not None


def test_tokenizer_with_more_tokens_than_embeddings_is_refused(folder: Path) -> None:
    """Regression: a small vocabulary with a huge token id took 16 GB of the build's memory."""
    _set_huge_token_id(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _refused(folder, "has tokens up to 4000000000 and the model only .* embeddings")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"


def test_huge_token_id_is_refused_if_the_config_states_no_embeddings(folder: Path) -> None:
    _set_huge_token_id(folder)
    with pytest.raises(CheckpointError, match="has tokens up to 4000000000; expected at most"):
        load_tokenizer(folder, "model", PreTrainedConfig())


def _set_huge_token_id(folder: Path) -> None:
    """Give a word of the tokenizer in `folder` the id 4,000,000,000."""
    document = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary[next(word for word in vocabulary if word.isalpha())] = 4_000_000_000
    (folder / "tokenizer.json").write_text(json.dumps(document))


def test_padding_to_a_huge_length_is_ignored(folder: Path) -> None:
    padding = {
        "strategy": {"Fixed": 1 << 40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    _tokenizer(folder, padding=padding)
    tokenizer = locate(make_spec(model=str(folder), name="model").source).tokenizer
    assert len(tokenizer.backend_tokenizer.encode("a").ids) < 10


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"version": "1.0", "model": {"type": "WordPiece"}}', "\x00", '{"model": null}', "{}"]
)
def test_invalid_tokenizer_json_is_refused(text: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(text)
    _refused(folder, "the tokenizer of .* does not load")


def test_code_of_a_checkpoint_is_not_run(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "it-ran"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (folder / name).write_text(f"open({str(run)!r}, 'w')\nclass Evil: pass\n")
    automatic = {"AutoConfig": "configuration_evil.Evil", "AutoModelForSequenceClassification": "modeling_evil.Evil"}
    _edit(folder / "config.json", auto_map=automatic)
    _edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})
    checkpoint = resolve(make_spec(model=str(folder), name="model"))
    assert checkpoint.task.name == "text-classification"
    assert not run.exists()
    remark = code_not_run(checkpoint)
    assert remark is not None, "nobody was told that another model answers"
    assert "code of the checkpoint (modeling_evil.Evil), which is not run" in remark


def test_type_that_only_a_checkpoints_code_defines_is_refused(folder: Path) -> None:
    """NV-Embed is saved so: transformers has no class of its type, nor of the types within."""
    code = {"AutoConfig": "configuration_nvembed.NVEmbedConfig", "AutoModel": "modeling_nvembed.NVEmbedModel"}
    _edit(folder / "config.json", model_type="nvembed", architectures=["NVEmbedModel"], auto_map=code)
    _refused(folder, r"its code \(configuration_nvembed.NVEmbedConfig\) would have to run, .* is never run", resolve)


IMPLEMENTATIONS = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation")


@pytest.mark.parametrize("field", IMPLEMENTATIONS)
def test_kernels_named_by_a_configuration_are_not_loaded(
    field: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: transformers downloaded and imported a kernel of that name where `kernels` is installed."""
    asked: list[str] = []
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: asked.append(name))
    _edit(folder / "config.json", **{field: "evil/kernel"})
    assert resolve(make_spec(model=str(folder), name="model")).model.config._attn_implementation == "sdpa"
    assert asked == []


@pytest.mark.parametrize("field", IMPLEMENTATIONS)
def test_kernels_named_by_a_nested_configuration_are_dropped(field: str, tmp_path: Path) -> None:
    document = {"model_type": "t5gemma", **{part: {field: "evil/kernel"} for part in ("encoder", "decoder")}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    config = read_configuration(tmp_path, "model")
    for one in (config, config.encoder, config.decoder):
        assert one._attn_implementation is None
        assert one._experts_implementation is None


def test_tokenizer_probe_imports_nothing_heavy() -> None:
    """Regression: every build starts this process, whose time numpy tripled."""
    code = "import sys, builder.checkpoints.tokenizer_probe; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "torch", "transformers", "onnxruntime"} & set(done.stdout.split())


def test_build_reports_a_panic_of_the_tokenizers_library() -> None:
    """Regression: a panic is not an Exception, and passed every handler."""
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = Split(Regex("(0+)+[;@]"), "isolated")
    with pytest.raises(CheckpointError, match="the tokenizer of model fails"), panics_refused("model"):
        tokenizer.encode("0" * 4096 + "\x01;")


def test_labels_with_control_characters_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    first = next(iter(config["id2label"]))
    _edit(folder / "config.json", id2label={**config["id2label"], first: "a\x1b]0;owned\x07"})
    resolved = resolve(make_spec(model=str(folder), name="model"))
    with pytest.raises(CheckpointError, match=r"id2label of config.json has a label with control characters: 'a\\x1b"):
        encoder_task(resolved.task).parameters(resolved)
