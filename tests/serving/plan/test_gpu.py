"""Plans for GPUs: the capacity of each card, and the same numbers in builds, Compose and Kubernetes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from builder.clusters.deploy.pod import pod
from builder.clusters.deploy.sizes import as_built, as_planned
from builder.common.errors import SpecError
from builder.common.memory import cache_bytes
from builder.engines.gpu import CONTEXT, HEADROOM, SERVER_ON_CARD
from builder.options import BuildSpec, Card, make_spec
from builder.repository.config.render import render
from builder.repository.layout.encoder import lay_out, serving_document
from builder.runtime.contract import LayerShape
from builder.runtime.fields import Field
from builder.serving.plan import machine
from builder.serving.plan.gpu import plan_on_gpu, usable_bytes
from builder.serving.plan.lines import ModelPlan
from builder.serving.plan.needs import ModelNeeds, needs_of
from builder.serving.plan.pods import Pod, PodSize
from tests.clusters.deploy.deployments import ON_GPU, WITH_GPU
from tests.golden.repositories import graph
from tests.tiny_encoders import make_checkpoint

GB = 1_000_000_000
ENCODER = ModelNeeds("encoder", GB, 512, measured="not measured", activations=GB // 2, activated="2048 tokens")
LAYERS = (LayerShape(8, 128),) * 32
DECODER = ModelNeeds("generation", 8 * GB, 4096, LAYERS, cache="float16", activations=GB, activated="272 tokens")
TWO = [{"name": "l4", "memory_gb": 24}, {"name": "t4"}]


class _Compose(yaml.SafeLoader):
    """YAML loader that reads Compose's own tags."""


def _sequence(loader: Any, node: Any) -> Any:
    return loader.construct_sequence(node, deep=True)


_Compose.add_constructor("!override", _sequence)


def _spec(name: str = "it", gpus: Any = TWO, **options: Any) -> BuildSpec:
    options = {"target": "cuda", "precision": "fp16", **options}
    stated = {"cores": 4, "memory_gb": 64, "gpus": gpus}
    return make_spec(model="org/it", name=name, machine=stated, load={"requests_per_s": 50}, **options)


def _plan(needs: ModelNeeds, **options: Any) -> ModelPlan:
    spec = _spec(**options)
    assert spec.load is not None
    return plan_on_gpu(spec, spec.load, needs)


def _lines(plan: ModelPlan) -> dict[str, str]:
    return {line.quantity: line.result for line in plan.lines}


def test_usable_memory_of_a_card_leaves_headroom_and_the_server() -> None:
    assert usable_bytes(Card(name="l4", memory_gb=24)) == pytest.approx(0.9 * 24e9 - SERVER_ON_CARD)
    assert Card(name="t4").memory == 15360 << 20


def test_plan_counts_the_encoder_instances_that_fit_each_card() -> None:
    plan = _plan(ENCODER, instances=3)
    lines = _lines(plan)
    fit = math.floor((0.9 * 24e9 - SERVER_ON_CARD) / 1.5e9)
    assert lines["GPU 0 (l4)"] == f"{fit} instances fit"
    assert lines["GPU 1 (t4)"] == f"{math.floor((0.9 * 2**34 - SERVER_ON_CARD) / 1.5e9)} instances fit"
    assert plan.gpu_memory == {0: 4_500_000_000}
    assert plan.cores is None, "how fast it is on the card is not known"
    assert plan.lacking == ()
    assert "not measured" in plan.notes[0]
    (text,) = _plan(ENCODER, instances=fit + 1).lacking
    assert text.startswith("GPU 0 (l4) has room for")
    assert "What helps: a larger card" in text


def test_plan_of_a_paged_cache_uses_the_requested_size() -> None:
    plan = _plan(DECODER, slots=64, cache_gb=4)
    block = cache_bytes(LAYERS, 1, 128, 2)
    assert _lines(plan)["longest texts at once"] == str(int(4e9 // block) // 32), "4096 tokens in blocks of 128"
    in_slots = _plan(DECODER, slots=64)
    cache = int(4e9 // block) * block
    assert in_slots.gpu_memory[0] - plan.gpu_memory[0] == 64 * cache_bytes(LAYERS, 1, 4096, 2) - cache
    assert plan.settings["cache_gb"] == 4
    assert "max_length" not in plan.settings


def test_plan_counts_the_decoder_slots_that_fit_each_card() -> None:
    plan = _plan(DECODER, slots=8)
    of_slot = cache_bytes(LAYERS, 1, 4096, 2)
    rest = 9 * GB + CONTEXT
    assert _lines(plan)["most slots, GPU 0 (l4)"] == str(math.floor((0.9 * 24e9 - SERVER_ON_CARD - rest) / of_slot))
    assert plan.gpu_memory == {0: rest + 8 * of_slot}, "weights, activations, cache and CUDA in its own process"
    assert plan.settings["slots"] == 8
    through_bls = _plan(DECODER, slots=8, executor="bls")
    assert through_bls.gpu_memory == {0: 9 * GB + 8 * of_slot}, "the server's CUDA"
    assert any("GPU 0" in text for text in _plan(DECODER, slots=64).lacking)
    shared = _plan(DECODER, slots=64, cache_gb=2)
    block = cache_bytes(LAYERS, 1, 128, 2)
    assert shared.gpu_memory == {0: rest + 2 * GB // block * block}, "whole blocks that all sequences share"
    assert shared.settings["cache_gb"] == 2


def test_plan_names_options_that_a_card_does_not_support() -> None:
    (text,) = _plan(ENCODER, gpus=[{"name": "t4"}], precision="bf16").lacking
    assert text.startswith("GPU 0: ")
    assert "bf16" in text
    with pytest.raises(SpecError, match="say which cards its machine has"):
        _plan(ENCODER, gpus=[])
    with pytest.raises(SpecError, match=r"gpu\.devices names card 2 and machine\.gpus has 2"):
        _spec(gpu={"devices": [0, 2]})
    with pytest.raises(SpecError, match="the cards known are"):
        _spec(gpus=[{"name": "voodoo2"}])


def test_build_applies_the_gpu_settings_of_the_plan() -> None:
    """Settings written to models.yaml appear in config.pbtxt."""
    plan = _plan(ENCODER, instances=2, gpu={"devices": [0, 1]})
    assert plan.gpu_memory == {0: 3 * GB, 1: 3 * GB}
    found = plan.settings
    assert found == {"instances": 2, "gpu.devices": [0, 1], "gpu.card": "t4"}
    options: dict[str, Any] = {"instances": found["instances"]}
    options["gpu"] = {"devices": found["gpu.devices"], "card": found["gpu.card"]}
    spec = make_spec(model="org/encoder", target="cuda", precision="fp16", **options)
    made = graph("onnxruntime")
    serving = serving_document(spec, "feature_extraction", made, 256, {"input_ids": 0}, {})
    fields = [Field("text_input", "TYPE_STRING")], [Field("embedding", "TYPE_FP32", (384,))]
    _, engine = lay_out(spec, serving, "{}", made, {}, fields, [])
    config = render(engine.config)
    assert "  count: 2\n  kind: KIND_GPU\n  gpus: [ 0, 1 ]\n" in config


def _machine(monkeypatch: pytest.MonkeyPatch, *specs: BuildSpec) -> machine.MachinePlan:
    monkeypatch.setattr(machine, "needs_of", lambda spec: DECODER if spec.entry_name == "writes" else ENCODER)
    return machine.plan(specs)[1]


def test_plan_adds_up_the_models_of_each_card(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _machine(monkeypatch, _spec("a"), _spec("b", gpu={"devices": [1]}), _spec("c", gpu={"devices": [1]}))
    lines = {line.quantity: line.formula for line in found.lines}
    assert lines["GPU 0 (l4)"].endswith("of the server + a")
    assert lines["GPU 1 (t4)"].endswith("of the server + b + c")
    assert found.lacking == ()
    assert found.gpus == 2
    service = yaml.load(found.compose("triton-gpu"), _Compose)["services"]["triton-gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    crowded = _machine(monkeypatch, *(_spec(name, instances=8) for name in "abcd"))
    assert any(text.startswith("GPU 0 (l4)") and "a, b, c, d need" in text for text in crowded.lacking)


def test_replica_requests_every_card_of_its_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "needs_of", lambda spec: ENCODER)
    file = tmp_path / "models.yaml"
    file.write_text(
        "defaults: {machine: {cores: 4, memory_gb: 64, gpus: [{name: l4}, {name: l4}]}}\n"
        "models:\n"
        "  - {model: org/card, name: card, target: cuda, precision: fp16, gpu: {devices: [0, 1]},\n"
        "     load: {requests_per_s: 5}}\n"
    )
    (model,), size = as_planned([ON_GPU], file, 1, None)
    assert size.gpus == 2
    assert model.plan.gpu_memory.keys() == {0, 1}
    (triton,) = [c for c in pod(replace(WITH_GPU, size=size))["initContainers"] if c["name"] == "triton"]
    assert triton["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert as_built([model], 4).gpus == 2


def test_pod_fits_only_if_each_card_has_enough_memory() -> None:
    on_second = Pod((ModelPlan("a", (), {}, GB, 0, gpu_memory={1: 10 * GB}),))
    assert on_second.fits(PodSize(4, 64 * GB, None, (HEADROOM * 24 * GB, HEADROOM * 24 * GB)))
    assert not on_second.fits(PodSize(4, 64 * GB, None, (HEADROOM * 24 * GB, HEADROOM * 8 * GB)))


def test_plan_supports_an_encoder_without_attention_heads(tmp_path: Path) -> None:
    """FNet's config has no attention heads: it uses Fourier transforms instead of attention."""
    folder = make_checkpoint(tmp_path / "c", "fnet", "text-classification", {0: "a", 1: "b"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_attention_heads", None)
    (folder / "config.json").write_text(json.dumps(config))
    needs = needs_of(make_spec(model=str(folder), output=tmp_path / "r", target="cuda", precision="fp16"))
    assert needs.activations > 0


def test_gpu_needs_come_from_the_config_without_cpu_latencies(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without a GPU nothing is measured, and CPU measurements are not reported for a GPU."""
    load, gpu = {"requests_per_s": 1}, {"target": "cuda", "precision": "fp16", "machine": {"gpus": [{"name": "l4"}]}}
    for name, kind in (("topics", "encoder"), ("writes", "generation")):
        spec = make_spec(model=str(checkpoint(name)), output=tmp_path, slots=4, load=load, **gpu)
        needs = needs_of(spec)
        assert needs.kind == kind
        assert needs.latency is None
        assert "not measured on this card" in needs.measured
        assert needs.activations > 0
        larger = spec.model_copy(update={"serving": spec.serving.model_copy(update={"token_budget": 1 << 16})})
        assert (needs_of(larger).activations > needs.activations) == (kind == "encoder")
        assert needs_of(spec.model_copy(update={"slots": 64})).activations >= needs.activations
    assert needs.cache == "float16"
    with pytest.raises(SpecError, match="encoder-decoders run on the CPU alone"):
        needs_of(make_spec(model=str(checkpoint("sums")), output=tmp_path, load=load, **gpu))
