"""Every architecture of the support table: exported, fused as promised, equal to PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.building.verify.parity import TOLERANCE
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.engines.optimise.fusion import fuse
from builder.graphs.export.encoder import export
from builder.graphs.export.rows import rows_of
from builder.options import make_spec
from tests.graph_error import graph_error
from tests.tiny_encoders import ARCHITECTURES, make_checkpoint


@pytest.mark.every_architecture
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_encoder_is_fused_and_equal_to_pytorch(model_type: str, tmp_path: Path) -> None:
    """Batches of 3 to 300 tokens exceed ModernBERT's window of 16."""
    folder = make_checkpoint(tmp_path / "checkpoint", model_type, "fill-mask")
    spec = make_spec(model=str(folder), name="model")
    checkpoint = resolve(spec)
    exported = export(checkpoint, tmp_path)
    fused = fuse(exported.graph, tmp_path)
    assert checkpoint.task.name == "fill-mask"
    assert exported.attentions == fused.operators["MultiHeadAttention"] == ARCHITECTURES[model_type].fused
    assert (exported.warning is None) == (exported.attentions == exported.layers)
    assert fused.operators["LayerNormalization"] + fused.operators["SkipLayerNormalization"] >= 1 or (
        model_type == "eurobert"
    ), "RMSNorm is the only reason to have no fused normalisation"
    error = graph_error(
        fused, exported.module, rows_of(checkpoint), checkpoint.max_length, encoder_task(checkpoint.task).per_token
    )
    assert error < TOLERANCE


def test_sliding_window_changes_the_answer(tmp_path: Path) -> None:
    """The same weights with a window wider than the text give different answers."""
    outputs = []
    for window in (16, 600):
        folder = make_checkpoint(tmp_path / f"window-{window}", "modernbert", "fill-mask", local_attention=window)
        spec = make_spec(model=str(folder), name="model")
        checkpoint = resolve(spec)
        exported = export(checkpoint, folder)
        outputs.append((exported, checkpoint))
    (narrow, checkpoint), (wide, _) = outputs
    error = graph_error(narrow.graph, wide.module, rows_of(checkpoint), 512, False)
    assert error > 100 * TOLERANCE


def test_missing_fused_attention_is_reported_with_its_cost(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "convbert", "fill-mask")
    spec = make_spec(model=str(folder), name="model")
    exported = export(resolve(spec), tmp_path)
    assert exported.warning is not None
    assert "0 of 2 attentions are fused" in exported.warning
    assert "slower" in exported.warning
