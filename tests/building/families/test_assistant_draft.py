"""A Gemma 4 whose draft is its assistant, against transformers' own way of asking the assistant."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from builder.building.pipeline import build
from builder.common.errors import CheckpointError
from builder.options import make_spec
from builder.repository.check import check
from builder.runtime.contract import DRAFT
from builder.serving.plan.needs import needs_of
from tests.assistants import Assistant, make_assistant
from tests.building.families.test_draft import LENGTH, OPTIONS, said
from tests.building.families.test_eagle_draft import proposals_of
from tests.decoders import make_decoder_checkpoint

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # of the target, the draft and the build
    "onnxruntime": ({}, {}, {}),
    "openvino": ({}, {}, {"engine": "openvino", "cache": "fp32"}),
    "all layers with keys of their own, ordered": ({"num_kv_shared_layers": 0}, {"ordered": True}, {}),
}


def spec_of(folder: Path, **options: Any) -> Any:
    given = {"max_length": LENGTH, "slots": 4, "output": folder / "repository", **options}
    return make_spec(model=str(folder / "model"), name="writes", draft=str(folder / "assistant"), **given)


@pytest.mark.parametrize("case", CASES)
def test_assistant_guesses_what_transformers_guesses(case: str, tmp_path: Path) -> None:
    """The guesses go on past the window, and the text is the one without a draft."""
    of_target, of_draft, options = CASES[case]
    make_decoder_checkpoint(tmp_path / "model", "gemma4_text", **of_target)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    make_assistant(tmp_path / "assistant", target, **of_draft)
    spec = spec_of(tmp_path, **options)
    if not of_draft:
        check_plan(needs_of(spec).draft, target, tmp_path / "assistant")
    report = build(spec)
    assert check(tmp_path / "repository") == []
    assert report.draft is not None
    assert report.draft["checkpoint"]["source"] == "assistant"
    version = tmp_path / "repository" / "writes" / "1"
    if of_target:  # transformers returns the keys and values of a model that shares some alone
        for layer in target.get_decoder().layers[-2:]:
            layer.self_attn.store_full_length_kv = True
    reference, proposals = Assistant(tmp_path / "assistant", target), proposals_of(version)
    assert len(proposals) > 4
    assert max(len(tokens) for _, tokens in proposals) >= 4
    assert max(len(before) for before, _ in proposals) > target.config.sliding_window
    for before, tokens in proposals:
        assert tokens == reference.propose(before, len(tokens))
    plain = tmp_path / "plain"
    shutil.copytree(version, plain)
    shutil.rmtree(plain / DRAFT)
    drafted = 0
    for asked in OPTIONS[:2]:
        texts, stats = said(version, **asked)
        without_draft, _ = said(plain, **asked)
        assert texts == without_draft, asked
        drafted += stats.drafted_tokens
    assert drafted > 0, "greedy text may repeat itself, which lookup finds"


def check_plan(planned: int, target: PreTrainedModel, draft: Path) -> None:
    """Compare with its weights, the target's embeddings, its cache, and the target's states, keys and values."""
    keys = 2 * (8 + 16)  # and values of one head in each of the two kinds of layers
    stored = load_file(draft / "model.safetensors").items()
    weights = sum(tensor.numel() for name, tensor in stored if not name.endswith("layer_scalar"))  # no parameter
    weights += target.get_input_embeddings().weight.numel()
    assert planned == 4 * (weights + 4 * LENGTH * (keys + target.config.hidden_size + keys))


def test_assistant_alone_is_refused(tmp_path: Path) -> None:
    gemma = AutoModelForCausalLM.from_pretrained(make_decoder_checkpoint(tmp_path / "model", "gemma4_text"))
    draft = make_assistant(tmp_path / "assistant", gemma)
    shutil.copy(tmp_path / "model" / "tokenizer.json", draft)
    with pytest.raises(CheckpointError, match="give it to that one as --draft"):
        build(make_spec(model=str(draft), output=tmp_path / "repository"))


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("llama", {}, "is an assistant of Gemma 4; the model is llama"),
        ("gemma4_text", {"vocab_size": 99}, "for a model with a vocabulary of 99, where the model has "),
        ("gemma4_text", {"global_head_dim": 8}, r"heads of keys in its full_attention layers, .* \[1, 8\], where"),
    ],
)
def test_assistant_of_another_model_is_refused(
    target: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    gemma = AutoModelForCausalLM.from_pretrained(make_decoder_checkpoint(tmp_path / "gemma", "gemma4_text"))
    make_decoder_checkpoint(tmp_path / "model", target)
    make_assistant(tmp_path / "assistant", gemma, **settings)
    with pytest.raises(CheckpointError, match=message):
        build(spec_of(tmp_path))
