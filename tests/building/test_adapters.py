"""Adapters of a built model: added, replaced and removed while it is served, and compared with PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from builder.building.adapters import add_adapter
from builder.building.pipeline import build
from builder.checkpoints.linear_layers import linear_layers
from builder.checkpoints.lora import merged, read_lora
from builder.cli import main
from builder.common.errors import BuilderError, CheckpointError, RepositoryError, VerificationError
from builder.options import make_spec
from builder.repository.adapters import read_adapters, remove_adapter
from builder.repository.check import check
from builder.repository.report.record import BuildReport, read_report
from builder.runtime.adapter_files import ALL_ADAPTERS
from builder.runtime.fields import InputError
from builder.runtime.generation.service import Service
from builder.serving.plan.needs import published
from tests.decoders import make_decoder, make_decoder_checkpoint
from tests.lora import AdaptedModel, save_lora

PROMPT = "The museum in Oslo opens"
COUNT = 12


class Built(AdaptedModel):
    """Llama that takes two adapters of rank 4, its checkpoint, and three adapters in PEFT's files."""

    def expected(self, source: str) -> str:
        """Return the greedy text of transformers with the adapter merged into the checkpoint."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
        ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        settings: dict[str, Any] = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
        model.generation_config.eos_token_id = None
        if not source:
            tokens = model.generate(ids, **settings)
        else:
            with merged(model, read_lora(str(self.saved[source]), linear_layers(model), 4)):
                tokens = model.generate(ids, **settings)
        return str(tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def built(module_folder: Callable[[str], Path]) -> Built:
    folder = module_folder("adapters")
    checkpoint = make_decoder_checkpoint(folder / "checkpoint", "llama")
    options = {"slots": 4, "max_length": 128, "engine": "onnxruntime", "adapters": 2, "adapter_rank": 4}
    build(make_spec(model=str(checkpoint), name="m", output=folder / "repository", **options))
    model = make_decoder("llama")
    saved = {
        "a": save_lora(folder / "a", model, ("q_proj", "v_proj"), seed=1),
        "b": save_lora(folder / "b", model, ("gate_proj", "o_proj"), rank=2, seed=2),
        "c": save_lora(folder / "c", model, ("down_proj",), seed=3),
    }
    return Built(folder / "repository", checkpoint, saved)


@pytest.fixture
def clean(built: Built) -> Built:
    """Return the built model without adapters."""
    built.remove_all()
    return built


def opened(built: Built) -> Service:
    return Service(built.repository / "m" / "1")


def submit(service: Service, adapter: str) -> list[Any]:
    """Submit a greedy request with `adapter`; return the list that its answer is appended to."""
    answers: list[Any] = []
    tensors = {"text_input": np.array([PROMPT], object)}
    if adapter:
        tensors["lora_name"] = np.array([adapter], object)
    options = {"max_tokens": COUNT, "ignore_eos": True, "temperature": 0.0}
    service.submit(tensors, options, lambda answer, last: answers.append(answer))
    return answers


def text(answers: list[Any]) -> str:
    (answer,) = answers
    return str(answer["text_output"][0].decode())


def answer(service: Service, adapter: str = "") -> str:
    answers = submit(service, adapter)
    service.loop.run_until_idle()
    return text(answers)


def listed(service: Service) -> Any:
    """Return the adapters that the model says it has."""
    answers: list[Any] = []
    tensors = {"text_input": np.array(["-"], object), "lora_name": np.array([ALL_ADAPTERS], object)}
    assert service.prepare(tensors, {}, lambda answer, last: answers.append(answer)) == []
    return json.loads(text(answers))


def test_adapters_change_while_the_model_is_served(clean: Built) -> None:
    """Added, used beside the base, replaced, removed: each with the next request, without a reload."""
    service = opened(clean)
    base = clean.expected("")
    assert answer(service) == base
    with pytest.raises(InputError, match="lora_name is 'a', which is not an adapter of this model; it has none yet"):
        answer(service, "a")
    clean.add("a")
    clean.add("b")
    together = [submit(service, name) for name in ("a", "", "b", "a")]
    service.loop.run_until_idle()
    assert [text(one) for one in together] == [clean.expected("a"), base, clean.expected("b"), clean.expected("a")]
    clean.add("a", "c")
    assert answer(service, "a") == clean.expected("c"), "the prompt's keys and values of before are not reused"
    clean.add("c")
    for name in ("c", "b", "a", ""):  # three where two answer at once
        assert answer(service, name) == clean.expected({"a": "c"}.get(name, name))
    assert listed(service) == ["a", "b", "c"]
    remove_adapter(clean.repository, "m", "b")
    with pytest.raises(InputError, match="lora_name is 'b', which is not an adapter of this model; it has a, c"):
        answer(service, "b")
    assert answer(service) == base


@pytest.mark.parametrize("name", ["../1/tokenizer", "a/b", "", ".", "a\0", "a" * 300])
def test_requests_name_no_other_files(clean: Built, name: str) -> None:
    service = opened(clean)
    if not name:
        assert answer(service, name) == clean.expected("")
        return
    with pytest.raises(InputError, match="is not an adapter of this model"):
        answer(service, name)


def test_adapter_that_fits_another_version_is_refused_by_name(clean: Built, tmp_path: Path) -> None:
    clean.add("a")
    path = clean.repository / "m" / "adapters" / "a.npz"
    with np.load(path) as arrays:
        changed = {name: np.zeros((7, 2), np.float32) if name != "about" else arrays[name] for name in arrays.files}
    np.savez(path, **changed)
    with pytest.raises(InputError, match=r"the adapter a does not fit: .* has 7 numbers.* 32"):
        answer(opened(clean), "a")


@pytest.mark.parametrize("kept", [0, 400, -400])
def test_damaged_adapters_are_named(clean: Built, kept: int) -> None:
    """Regression: an interrupted copy failed inside the model and in the command."""
    clean.add("a")
    path = clean.repository / "m" / "adapters" / "a.npz"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match="the adapter a cannot be read"):
        answer(opened(clean), "a")
    with pytest.raises(RepositoryError, match=r"a\.npz is damaged"):
        read_adapters(clean.repository, "m")


def test_check_and_report_know_a_model_with_adapters(clean: Built) -> None:
    clean.add("a")
    assert check(clean.repository) == []
    about = read_adapters(clean.repository, "m")["a"]
    assert (about.rank, about.base) == (4, "org/base")
    assert about.error is not None
    assert about.error < 1e-4
    layers = linear_layers(make_decoder("llama"))
    needs = published(clean.repository, "m")
    size = 4 * (3 + 2) * 4 * sum(one.inputs + one.outputs for one in layers.values())  # stacks, and adapters as read
    report = json.loads((clean.repository / "m" / "1" / "build.json").read_text())
    assert report["memory"]["adapters"] == size
    assert needs.weights == size + report["ladder"][1]["size"]


def test_add_compares_with_the_checkpoint_that_was_built(clean: Built, tmp_path: Path) -> None:
    """Another checkpoint is refused; without any, shapes alone are checked, and the adapter is not called verified."""
    other = make_decoder_checkpoint(tmp_path / "other", "llama", initializer_range=0.1)
    with pytest.raises(CheckpointError, match="other weights than the checkpoint that m was built from"):
        add_adapter(clean.repository, "m", "a", str(clean.saved["a"]), str(other))
    assert read_adapters(clean.repository, "m") == {}
    assert add_adapter(clean.repository, "m", "a", str(clean.saved["a"])).verified is None


def test_add_goes_on_without_a_hub_and_not_without_the_named_base(
    clean: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(spec: Any) -> Any:
        raise CheckpointError(f"the Hub did not give {spec.model}@{spec.revision}")

    def from_the_hub(repository: Path, name: str) -> BuildReport:
        report = read_report(repository, name)
        return replace(report, checkpoint={**report.checkpoint, "source": "org/base", "revision": "5e1f"})

    monkeypatch.setattr("builder.building.adapters.resolve", absent)
    monkeypatch.setattr("builder.building.adapters.read_report", from_the_hub)
    assert add_adapter(clean.repository, "m", "a", str(clean.saved["a"])).verified is None
    with pytest.raises(CheckpointError, match="the Hub did not give org/other@None"):
        add_adapter(clean.repository, "m", "b", str(clean.saved["b"]), "org/other")


def test_add_refuses_wrong_answers(clean: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(model: PreTrainedModel, adapter: Any) -> Any:
        layers = {name: type(one)(one.a, one.b / 2, one.scale) for name, one in adapter.layers.items()}
        return merged(model, type(adapter)(**{**vars(adapter), "layers": layers}))

    monkeypatch.setattr("builder.building.adapters.merged", halved)
    with pytest.raises(VerificationError, match="log-probabilities are off"):
        clean.add("a")
    assert read_adapters(clean.repository, "m") == {}


def test_verb_adds_shows_and_removes_adapters(clean: Built, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["adapter", "m", "--repository", str(clean.repository)]
    assert main([*common, "--add", f"a={clean.saved['a']}", "--add", f"b={clean.saved['b']}"]) == 0
    printed = capsys.readouterr()
    assert "compared with nothing" in printed.err
    assert main([*common, "--remove", "a"]) == 0
    printed = capsys.readouterr()
    assert "b" in printed.out
    assert set(read_adapters(clean.repository, "m")) == {"b"}
    assert main([*common, "--remove", "a"]) == 1
    assert "m has no adapter a; it has b" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": "openvino"}, "--adapters is for --engine onnxruntime, in process on the CPU"),
        ({"executor": "bls"}, "--adapters is for --engine onnxruntime, in process on the CPU"),
        ({"target": "cuda", "precision": "fp16"}, "--adapters is for --engine onnxruntime, in process on the CPU"),
        ({"adapters": 0, "adapter_rank": 8}, "--adapter-rank needs --adapters"),
        ({"adapters": 0, "adapter_layers": "q_proj"}, "--adapter-layers needs --adapters"),
        ({"adapter_labels": 3}, "--adapter-labels"),
        ({"adapters": 0, "adapter_labels": 3}, "--adapter-labels needs --adapters"),
        (
            {"adapters": 512, "adapter_rank": 512, "machine": {"memory_gb": 1}},
            "the cache and the adapters need .* 512 adapters of rank 512.* lower --adapters",
        ),
        ({"adapter_layers": "q_proj, lm_head"}, "names lm_head, which adapters cannot change; .* down_proj, gate_proj"),
    ],
)
def test_build_refuses_adapters_that_no_graph_takes(
    built: Built, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BuilderError, match=reason):
        build(make_spec(model=str(built.checkpoint), output=tmp_path / "out", **{"adapters": 1, **options}))
    assert not (tmp_path / "out").exists()


def test_model_without_adapters_refuses_them(built: Built, tmp_path: Path) -> None:
    build(make_spec(model=str(built.checkpoint), name="m", output=tmp_path, slots=2, max_length=128))
    with pytest.raises(RepositoryError, match="m was built without --adapters: build it again with --adapters N"):
        add_adapter(tmp_path, "m", "a", str(built.saved["a"]))
    with pytest.raises(InputError, match="'lora_name' is not an option of this model"):
        Service(tmp_path / "m" / "1").submit({}, {"lora_name": "a"}, lambda answer, last: None)


def test_adapter_of_a_quantised_model_is_judged_by_its_agreement(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"slots": 2, "max_length": 128, "adapters": 1, "adapter_rank": 4, "adapter_layers": "q_proj,v_proj"}
    judged = {"precision": "int8-weights", "quality": 0.8, "perplexity": 2.0}
    build(make_spec(model=str(built.checkpoint), name="m", output=tmp_path, **options, **judged))
    about = add_adapter(tmp_path, "m", "a", str(built.saved["a"]), str(built.checkpoint))
    assert about.agreement is not None
    assert 0.8 <= about.agreement < 1
    with pytest.raises(CheckpointError, match=r"changes model.layers.0.mlp.down_proj, .* can change q_proj, v_proj$"):
        add_adapter(tmp_path, "m", "c", str(built.saved["c"]))
    monkeypatch.setattr("builder.building.adapters.merged", lambda model, adapter: nullcontext())
    with pytest.raises(VerificationError, match="int8-weights with the adapter has a next-token agreement of 0"):
        add_adapter(tmp_path, "m", "b", str(built.saved["a"]), str(built.checkpoint))
