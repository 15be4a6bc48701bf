"""Models of one deployment that share a card: what they take of its memory together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builder.building.pipeline import build
from builder.cli import main
from builder.clusters.deploy.contents import read_deployed_models
from builder.clusters.deploy.deployment import DeployedModel, Deployment, check_deployment
from builder.common.errors import SpecError
from builder.options import make_spec
from tests.clusters.deploy.deployments import ON_GPU, WITH_GPU
from tests.decoders import make_decoder_checkpoint


def decoders(*cards: int, gigabytes: int = 12, card: str | None = "l4") -> Deployment:
    """Return a deployment of decoders that take `gigabytes` each on a card of these numbers."""
    models = tuple(
        replace(
            ON_GPU, name=f"model{index}", card=card, plan=replace(ON_GPU.plan, gpu_memory={number: gigabytes << 30})
        )
        for index, number in enumerate(cards)
    )
    return replace(WITH_GPU, models=models)


def engines(*shares: float, cards: int = 1) -> Deployment:
    """Return a deployment of models of an engine that takes these shares of its cards."""
    plan = replace(ON_GPU.plan, gpu_memory=dict.fromkeys(range(cards), 0))
    models = tuple(
        replace(ON_GPU, name=f"model{index}", container="vllm-python-py3", gpu_share=share, plan=plan)
        for index, share in enumerate(shares)
    )
    return replace(WITH_GPU, models=models)


def test_decoders_that_overfill_one_card_are_refused() -> None:
    """Regression: each was built for a whole card, and the second could not be loaded."""
    found, advice = r"model0 and model1 need 26,[\d,]+ MB of card 0 \(NVIDIA L4\)", "--slots.*gpu.devices"
    with pytest.raises(SpecError, match=f"{found}.*{advice}"):
        check_deployment(decoders(0, 0))


@pytest.mark.parametrize(
    "deployment",
    [decoders(0, 1), decoders(0, 0, gigabytes=8), decoders(0, 0, card=None), decoders(0), engines(0.45, 0.45)],
    ids=["two cards", "small", "card not named", "one", "shares"],
)
def test_models_that_fit_their_cards_are_deployed(deployment: Deployment) -> None:
    assert check_deployment(deployment) == deployment


def test_vllm_models_that_overfill_the_first_cards_are_refused() -> None:
    """Regression: vLLM gives each model the first cards, of which each takes 90 %."""
    with pytest.raises(SpecError, match=r"model0 and model1 take 180 % .*card 0.*gpu_memory_utilization.*--model NAME"):
        check_deployment(engines(0.9, 0.9, cards=2))


def test_models_that_take_a_share_of_free_memory_do_not_share_a_card() -> None:
    with pytest.raises(SpecError, match=r"model0 and model1 each take most of .*free on card 0.*--model NAME"):
        check_deployment(engines(0, 0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder_checkpoint(tmp_path_factory.mktemp("cards") / "writer", "llama")


def test_vllm_share_is_that_of_its_arguments(checkpoint: Path, tmp_path: Path) -> None:
    """`arguments` may say another share than the option."""
    vllm = {"gpu_memory_utilization": 0.4, "arguments": {"gpu_memory_utilization": 0.3}}
    build(make_spec(model=str(checkpoint), output=tmp_path / "r", engine="vllm", vllm=vllm))
    (model,) = read_deployed_models(str(tmp_path / "r"))
    assert isinstance(model, DeployedModel)
    assert model.gpu_share == 0.3


@pytest.mark.parametrize("folder", ["/srv/models", "/models/llm"])
def test_checkpoint_outside_the_mounted_folder_is_refused(
    folder: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: manifests mounted the repository at /models, whatever vllm.models_folder was."""
    vllm = {"models_folder": folder}
    build(make_spec(model=str(checkpoint), output=tmp_path / "r", engine="vllm", vllm=vllm))
    options = ["--to", "kubernetes", "--cores", "8", "--registry", "registry.example"]
    assert main(["deploy", "--repository", str(tmp_path / "r"), "--output", str(tmp_path / "out"), *options]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"loads {folder}/writer/1/checkpoint" in error
    assert "vllm.models_folder" in error
