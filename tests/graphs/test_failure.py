"""A model that cannot be exported is refused with a reason in one line, without PyTorch's long advice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.inkling.modeling_inkling import InklingAttention

from builder.building.pipeline import build
from builder.checkpoints.text_part import text_part
from builder.common.errors import CheckpointError, ExportError
from builder.graphs.export.architectures import inkling_text
from builder.graphs.export.decoder import cache_shapes, export_decoder
from builder.graphs.export.failure import reason
from builder.graphs.export.program import to_onnx
from builder.options import make_spec
from scripts.tiny_models import make_checkpoint, tiny_model
from tests.tiny_encoders import SIZES


class Branching(torch.nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0] + 1 if tensors[0].sum() > 3 else tensors[0]


class Untranslated(torch.nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(tensors[0]).real


class Complex(torch.nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(tensors[0].reshape(4, 2, 2)).unsqueeze(0))


class Refusing(torch.nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        raise ExportError("this attention does not update the cache before it runs")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Branching(), "its code branches on the values of a text, and a graph has one branch"),
        (Untranslated(), "ONNX has no operator for aten.linalg_eig"),
        (Complex(), "its code computes with complex numbers (aten.unsqueeze), and ONNX's operators take real ones"),
        (Refusing(), "this attention does not update the cache before it runs"),
    ],
)
def test_reason_is_the_cause_in_one_line(module: torch.nn.Module, message: str) -> None:
    with pytest.raises(ExportError) as raised:
        to_onnx(module, [torch.eye(4)], [{}], ["values"], ["out"])
    assert str(raised.value) == message


def test_reason_names_the_line_of_the_model_s_code() -> None:
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bart", **SIZES, d_model=32)).eval()
    with pytest.raises(ValueError, match="<eos>") as raised:
        model(input_ids=torch.tensor([[5, 6, 7]]))
    said = "its code fails: Each example must contain at least one <eos> token. (ValueError in BartFor"
    assert reason(raised.value).startswith(said)
    assert "modeling_bart.py, line" in reason(raised.value)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("blt", "it reads bytes"),
        ("deepseek_v4", "its tokens see summaries of windows"),
        ("prophetnet", "in a prompt its scores have the biases of other tokens"),
        ("reformer", "its tokens see those in the buckets"),
    ],
)
def test_architectures_without_an_operator_are_refused_by_their_property(model_type: str, message: str) -> None:
    with pytest.raises(ExportError, match=f"{model_type} cannot be served for generation: {message}"):
        cache_shapes(tiny_model("CAUSAL_LM", model_type))


def test_decoder_whose_tokens_see_later_ones_is_refused_by_name(tmp_path: Path) -> None:
    """Regression: the text part of PaliGemma failed verification as "a bug worth reporting"."""
    model = text_part(tiny_model("MULTIMODAL_LM", "paligemma"))
    with pytest.raises(ExportError, match="gemma cannot be served for generation: its tokens see those after them"):
        export_decoder(model, tmp_path, 64)


def test_bias_without_the_cached_tokens_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a bias on new tokens alone, as transformers has Inkling's, failed in ONNX Runtime."""
    monkeypatch.setattr(inkling_text, "REPLACED", (InklingAttention, "forward", InklingAttention.forward))
    model = tiny_model("CAUSAL_LM", "inkling_text")
    with pytest.raises(ExportError, match="inkling_text cannot be served for generation: its bias on positions is for"):
        export_decoder(model, tmp_path, 64)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("moss_transcribe_diarize", "it takes no position_ids, and its .*embed_positions counts by the length"),
    ],
)
def test_other_ways_to_count_positions_are_refused(model_type: str, message: str, tmp_path: Path) -> None:
    """Regression: they failed verification as "a bug worth reporting"."""
    with pytest.raises(ExportError, match=message):
        export_decoder(tiny_model("CAUSAL_LM", model_type), tmp_path, 64)


@pytest.mark.parametrize("model_type", ["gpt2", "modernbert-decoder"])
def test_cache_shapes_are_read_without_weights_for_any_padding(model_type: str) -> None:
    """The first reads ids, which have no values on that device; the second requires a pad token."""
    model = tiny_model("CAUSAL_LM", model_type)
    model.config.pad_token_id = 3
    with torch.device("meta"):
        shapes = cache_shapes(type(model)(model.config).eval())
    assert shapes == cache_shapes(model)
    assert model.config.pad_token_id == 3


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [("modernvbert", "num_hidden_layers"), ("canine", "vocab_size"), ("t5gemma", "num_hidden")],
)
def test_models_of_several_parts_or_of_bytes_are_refused(model_type: str, missing: str, tmp_path: Path) -> None:
    """Regression: each ended in an AttributeError."""
    folder = make_checkpoint("SEQUENCE_CLASSIFICATION", model_type, tmp_path / "checkpoint")
    spec = make_spec(model=str(folder), task="text-classification", output=tmp_path / "out", max_length=64)
    with pytest.raises(
        CheckpointError, match=f"{model_type} cannot be served for text-classification: .* no {missing}"
    ):
        build(spec)
