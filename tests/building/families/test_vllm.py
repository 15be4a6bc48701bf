"""Repositories for Triton's vLLM backend. vLLM is not installed; arguments are checked against its known fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import builder.checkpoints.fetch as fetch_module
import builder.checkpoints.resolve as checkpoint_module
from builder.building.pipeline import build
from builder.cli import main
from builder.common.errors import SpecError
from builder.common.releases import RELEASES
from builder.engines.vllm.engine import INPUTS, OUTPUTS, VERSIONS, fields_of
from builder.options import make_spec
from builder.repository.check import check, verdicts
from builder.repository.config.render import parse
from tests.decoders import make_decoder_checkpoint
from tests.tiny_encoders import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(module_folder: Callable[[str], Path]) -> Path:
    return make_decoder_checkpoint(module_folder("vllm") / "writer", "llama")


def _build(checkpoint: Path, output: Path, **options: Any) -> dict[str, Any]:
    report = build(make_spec(model=str(checkpoint), output=output, engine="vllm", **options))
    document: dict[str, Any] = json.loads((output / "writer" / str(report.version) / "model.json").read_text())
    return document


def test_vllm_copies_a_local_checkpoint_and_names_its_container_path(checkpoint: Path, tmp_path: Path) -> None:
    arguments = _build(checkpoint, tmp_path / "r", precision="bf16", vllm={"tensor_parallel_size": 4}, max_length=64)
    assert arguments["model"] == "/models/writer/1/checkpoint"
    assert arguments["tensor_parallel_size"] == 4
    assert (arguments["dtype"], arguments["max_model_len"]) == ("bfloat16", 64)
    copied = tmp_path / "r" / "writer" / "1" / "checkpoint"
    assert (copied / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert check(tmp_path / "r") == []
    for version in VERSIONS:
        assert set(arguments) <= fields_of(version), f"vLLM {version} has all of them"
    built = json.loads((tmp_path / "r" / "writer" / "build.json").read_text())
    assert (built["verified"], built["verified_on"]) == (False, [])
    assert verdicts(tmp_path / "r") == {
        "writer": "not verified: vllm runs the checkpoint as it is; its answers were compared with nothing"
    }
    assert (built["target"], built["gpu"]) == ("cuda", None)
    assert "max_num_seqs" not in arguments, "how many run at once is vLLM's to choose by the card's memory"
    assert _build(checkpoint, tmp_path / "slots", slots=48, gpu={"card": "l4"})["max_num_seqs"] == 48
    assert json.loads((tmp_path / "slots" / "writer" / "build.json").read_text())["gpu"] == "l4"


def test_vllm_configuration_equals_the_backends(checkpoint: Path, tmp_path: Path) -> None:
    _build(checkpoint, tmp_path)
    config = parse((tmp_path / "writer" / "config.pbtxt").read_text(), "writer")
    assert (config.backend, config.max_batch_size) == ("vllm", 0)
    assert config.model_transaction_policy.decoupled
    assert config.HasField("dynamic_batching"), "one queue, so that a burst does not fill Triton's pool of payloads"
    assert [group.kind for group in config.instance_group] == [config.instance_group[0].KIND_MODEL]
    assert [value.name for value in config.input] == [field.name for field in INPUTS]
    assert [(value.name, list(value.dims)) for value in config.output] == [(OUTPUTS[0].name, [-1])]


def test_vllm_build_loads_no_weights(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(checkpoint_module, "load_model", refuse)
    _build(checkpoint, tmp_path)


def test_vllm_pins_a_hub_id_to_its_commit_without_its_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: dict[str, Any] = {}
    commit = tmp_path / "0123456789abcdef"
    commit.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix == ".json":
            (commit / file.name).write_bytes(file.read_bytes())

    def snapshot(name: str, allow_patterns: list[str], **_: object) -> str:
        fetched.update(name=name, patterns=allow_patterns)
        return str(commit)

    monkeypatch.setattr(fetch_module, "snapshot_download", snapshot)
    arguments = _build(Path("org/writer"), tmp_path / "r")
    assert (arguments["model"], arguments["revision"]) == ("org/writer", "0123456789abcdef")
    assert "*.safetensors" not in fetched["patterns"]
    assert not (tmp_path / "r" / "writer" / "1" / "checkpoint").exists()


def test_vllm_refuses_arguments_unknown_to_the_release(checkpoint: Path, tmp_path: Path) -> None:
    misspelt = {"arguments": {"max_model_length": 3}}
    with pytest.raises(SpecError, match=r"vLLM 0.5.5, which Triton 24.10 carries, .*did you mean 'max_model_len'"):
        _build(checkpoint, tmp_path, vllm=misspelt, triton="24.10")
    draft = {"arguments": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}}
    with pytest.raises(SpecError, match=r"does not know it; vLLM .* to 0.33.0 does: choose its release with --triton"):
        _build(checkpoint, tmp_path, vllm=draft, triton="24.10")
    arguments = _build(checkpoint, tmp_path, vllm=draft, triton="26.07")
    assert arguments["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 4}, (
        "nested, as it was given"
    )
    arguments = _build(checkpoint, tmp_path, vllm={"arguments": {"enforce_eager": True}}, precision="fp8")
    assert arguments["enforce_eager"] is True
    assert arguments["quantization"] == "fp8"


def test_vllm_second_version_runs_its_own_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        _build(checkpoint, tmp_path)
        arguments = json.loads((tmp_path / "writer" / str(number) / "model.json").read_text())
        assert arguments["model"] == f"/models/writer/{number}/checkpoint"
    weights = [tmp_path / "writer" / str(number) / "checkpoint" / "model.safetensors" for number in (1, 2)]
    assert weights[0].samefile(weights[1]), "what is the same takes its space once"
    assert check(tmp_path) == []


def test_vllm_fields_are_those_of_the_one_version_of_a_release() -> None:
    """Regression: between two versions that were read, the fields of both were accepted."""
    carried = {release.vllm for release in RELEASES.values()} - {None, "0.9.0rc1"}
    assert carried <= set(VERSIONS)
    assert fields_of("0.9.0rc1") == fields_of("0.9.0")
    assert "disable_log_requests" in fields_of("0.9.2")
    assert "async_scheduling" not in fields_of("0.9.2")
    assert "async_scheduling" in fields_of("0.10.1.1")
    assert "disable_log_requests" not in fields_of("0.10.1.1")
    assert "swap_space" not in fields_of("0.27.1")
    assert fields_of("0.6.0") == fields_of("0.5.5"), "not read: those of the one before it"
    assert fields_of("0.3.0") == set()
    assert fields_of("99.0") == fields_of(VERSIONS[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, "has fp32, fp16, bf16, fp8, not --precision int8"),
        ({"prune": 0.3}, "--prune cannot be used with --engine vllm"),
        ({"target": "cpu"}, "--target cpu has no --engine vllm"),
        ({"instances": 2}, re.escape("--instances (use vllm.tensor_parallel_size)")),
    ],
)
def test_vllm_refuses_options_it_lacks(options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        _build(checkpoint, tmp_path, **options)


def test_vllm_refuses_models_that_do_not_generate(tmp_path: Path) -> None:
    encoder = make_checkpoint(tmp_path / "reader", "bert", "feature-extraction")
    with pytest.raises(SpecError, match="vllm serves text-generation; this checkpoint is for feature-extraction"):
        build(make_spec(model=str(encoder), task="feature-extraction", output=tmp_path / "r", engine="vllm"))


def test_vllm_check_finds_missing_checkpoint_and_wrong_server(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _build(checkpoint, tmp_path)
    assert main(["serve", str(tmp_path)]) == 1
    assert "the embedded Triton has no vllm" in capsys.readouterr().err
    (tmp_path / "writer" / "1" / "checkpoint" / "config.json").unlink()
    assert any("names /models/writer/1/checkpoint, which is not there" in problem for problem in check(tmp_path))
