"""A model whose draft is its own layer for multi-token prediction, against transformers' generation with that layer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from builder.building.pipeline import build
from builder.checkpoints.drafts import MTP, draft_format
from builder.common.errors import CheckpointError, SpecError
from builder.options import Source, make_spec
from builder.repository.check import check
from builder.runtime.contract import DRAFT
from builder.serving.plan.needs import needs_of
from tests.building.families.test_draft import LENGTH, OPTIONS, said
from tests.building.families.test_eagle_draft import proposals_of
from tests.decoders import make_decoder_checkpoint
from tests.mtp_layers import Mtp, make_mtp_checkpoint, without

ARCHITECTURES = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")


def spec_of(model: Path, output: Path, **options: Any) -> Any:
    given = {"max_length": LENGTH, "slots": 4, "output": output, **options}
    return make_spec(model=str(model), name="writes", draft=str(model), **given)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, module_folder: Callable[[str], Path]) -> Path:
    return make_mtp_checkpoint(module_folder(f"mtp-{request.param}") / "model", request.param)


def test_own_layer_guesses_what_transformers_guesses(checkpoint: Path, tmp_path: Path) -> None:
    check_guesses(checkpoint, tmp_path)


def test_own_layer_guesses_what_transformers_guesses_on_openvino(tmp_path: Path) -> None:
    checkpoint = make_mtp_checkpoint(tmp_path / "model", "glm4_moe_lite")
    check_guesses(checkpoint, tmp_path / "repository", engine="openvino")


def check_guesses(checkpoint: Path, output: Path, **options: Any) -> None:
    """Build `checkpoint` with its own layer as draft; compare each guess with transformers', and texts without it."""
    report = build(spec_of(checkpoint, output, **options))
    assert check(output) == []
    assert report.draft is not None
    assert report.draft["checkpoint"]["source"] == "model"
    version, plain, reference = output / "writes" / "1", output / "plain", Mtp(checkpoint)
    proposals = proposals_of(version)
    assert len(proposals) > 5
    assert max(len(tokens) for _, tokens in proposals) >= 4
    for before, tokens in proposals:
        assert tokens == reference.propose(before, len(tokens))
    shutil.copytree(version, plain)
    shutil.rmtree(plain / DRAFT)
    for asked in OPTIONS:
        texts, stats = said(version, **asked)
        without_draft, _ = said(plain, **asked)
        assert texts == without_draft, asked
        assert stats.drafted_tokens > 0 or asked


def test_own_layer_is_planned(checkpoint: Path, tmp_path: Path) -> None:
    reference = Mtp(checkpoint)
    parameters = {id(value): value.numel() for value in reference.layer.parameters()}
    size = reference.target.config.hidden_size
    needs = needs_of(spec_of(checkpoint, tmp_path))
    layer = needs.layers[-1]
    cache = 4 * LENGTH * 2 * layer.heads * layer.size * 4
    assert needs.draft == 4 * sum(parameters.values()) + cache + 4 * LENGTH * size * 4


def test_only_the_model_itself_is_a_draft_by_its_own_layer(
    module_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = make_mtp_checkpoint(tmp_path / "model", "glm4_moe")
    link = tmp_path / "link"
    link.symlink_to(model)
    target = Source(str(model))
    assert draft_format(Source(str(link)), target) == draft_format(Source(f"{model}/"), target) == MTP
    other = Source(str(make_decoder_checkpoint(tmp_path / "other", "glm4_moe")))
    assert draft_format(other, other) is None, "its configuration counts a layer that is not there"
    assert draft_format(other, target) is draft_format(target, other) is None


def test_incomplete_layer_is_refused(tmp_path: Path) -> None:
    model = make_mtp_checkpoint(tmp_path / "model", "glm4_moe")
    spec = spec_of(model, tmp_path / "repository")
    without(model, "layers.2.hnorm.weight")
    with pytest.raises(CheckpointError, match=r"--draft .*: .* has no weight model\.layers\.2\.hnorm\.weight"):
        build(spec)
    make_mtp_checkpoint(model, "glm4_moe")
    without(model, "layers.2.self_attn.o_proj.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\. of .* is not one of glm4_moe: .*o_proj"):
        build(spec)
    make_mtp_checkpoint(model, "glm4_moe")
    without(model, **{"layers.2.eh_proj.weight": torch.zeros(32, 32)})
    with pytest.raises(CheckpointError, match=r"layers\.2\.eh_proj\.weight of .* has the shape \(32, 32\)"):
        build(spec)


def test_models_with_states_are_refused_by_name(tmp_path: Path) -> None:
    model = make_decoder_checkpoint(tmp_path / "model", "qwen3_next")
    with pytest.raises(
        SpecError, match="layers of qwen3_next keep a state, which a rejected guess cannot be taken out"
    ):
        build(spec_of(model, tmp_path / "repository"))
