"""EAGLE-3 drafts in the formats that exist, against EAGLE-3 written down apart from the build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from builder.checkpoints.drafts import EAGLE3, draft_format, eagle3
from builder.checkpoints.drafts.layers import DraftLayers
from builder.common.errors import CheckpointError
from builder.options import Source
from tests.decoders import make_decoder_checkpoint
from tests.eagle_drafts import Eagle3, make_eagle3

TOKENS = [5, 9, 11, 30, 7, 80, 200, 41]


@pytest.fixture(scope="module")
def target(module_folder: Callable[[str], Path]) -> PreTrainedModel:
    folder = make_decoder_checkpoint(module_folder("eagle3-target"), "llama", num_hidden_layers=8)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def loaded(folder: Path, target: PreTrainedModel) -> DraftLayers:
    assert draft_format(Source(str(folder)), Source("org/target")) == EAGLE3
    return eagle3.load(folder, [folder / "model.safetensors"], folder.name, target).eval()


@torch.no_grad()
def answers(layers: DraftLayers, target: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and what is read next, at each of TOKENS but the first."""
    states = layers.states.of(target(input_ids=torch.tensor([TOKENS[:-1]]), **layers.states.options))
    result = layers(torch.tensor([TOKENS[1:]]), states, use_cache=False).last_hidden_state[0]
    return layers.logits(result), result


@torch.no_grad()
def expected(folder: Path, target: PreTrainedModel, **about: Any) -> tuple[torch.Tensor, torch.Tensor]:
    reference = Eagle3(folder, target, **about)
    result = reference.layer(reference.embedded(TOKENS[1:]), reference.read(TOKENS[:-1]))
    return reference.logits(result), result


def with_settings(folder: Path, **settings: Any) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **settings}))


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({}, {}),
        ({"architectures": ["LlamaForCausalLM"]}, {}),
        ({"norm_before_residual": True}, {"before": True}),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, {"layers": (1, 3, 6)}),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, {"layers": (2, 4, 7)}),
        ({"eagle_config": {"use_aux_hidden_state": True}}, {}),
    ],
)
def test_eagle3_layers_compute_what_eagle3_does(
    settings: dict[str, Any], about: dict[str, Any], target: PreTrainedModel, tmp_path: Path
) -> None:
    folder = make_eagle3(tmp_path / "draft", target, **settings)
    layers = loaded(folder, target)
    for actual, right in zip(answers(layers, target), expected(folder, target, **about), strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-4)
    ids = load_file(folder / "model.safetensors")["d2t"] + torch.arange(200)
    assert layers.tokens(torch.eye(200)).tolist() == ids.tolist()


def test_eagle3_reads_what_speculators_saves(target: PreTrainedModel, tmp_path: Path) -> None:
    """Its settings are nested, its layer is counted, and its embeddings are its own."""
    folder = make_eagle3(tmp_path / "draft", target, layer="layers.0.")
    document = json.loads((folder / "config.json").read_text())
    known = document.pop("draft_vocab_size")
    document["architectures"] = ["LlamaForCausalLM"]
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": known,
        "norm_before_residual": True,
        "transformer_layer_config": document,
    }
    (folder / "config.json").write_text(json.dumps(nested))
    weights = load_file(folder / "model.safetensors")
    own = torch.randn(target.get_input_embeddings().weight.shape, generator=torch.Generator().manual_seed(3))
    save_file({**weights, "embed_tokens.weight": own}, folder / "model.safetensors")
    actual = answers(loaded(folder, target), target)
    for one, right in zip(actual, expected(folder, target, before=True), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4)


def test_eagle3_without_own_vocabulary_has_the_targets_head(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = make_eagle3(tmp_path / "draft", target, draft_vocab_size=None)
    weights = load_file(folder / "model.safetensors")
    own = {name: value for name, value in weights.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    save_file(own, folder / "model.safetensors")
    layers = loaded(folder, target)
    assert isinstance(layers.head, torch.nn.Linear)
    assert torch.equal(layers.head.weight, target.get_output_embeddings().weight)
    assert layers.tokens(torch.eye(4)).tolist() == [0, 1, 2, 3]
    save_file({**own, "lm_head.weight": weights["lm_head.weight"]}, folder / "model.safetensors")
    with_settings(folder, draft_vocab_size=200)
    with pytest.raises(CheckpointError, match="has no weight d2t, which says what its 200 tokens are"):
        loaded(folder, target)


def test_other_checkpoints_read_no_hidden_states(target: PreTrainedModel, tmp_path: Path) -> None:
    decoder = make_decoder_checkpoint(tmp_path / "decoder", "llama")
    assert draft_format(Source(str(decoder)), Source("org/target")) is None
    other = make_eagle3(tmp_path / "other", target, architectures=["Other"], speculators_model_type="other")
    assert draft_format(Source(str(other)), Source("org/target")) is None
