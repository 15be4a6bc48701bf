"""A graph is compared with PyTorch at the longest served text, and the cause of a difference is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from builder.building.pipeline import build
from builder.building.verify.parity import BUG, TOLERANCE, USUAL, cause, error_at, long_lengths, long_references
from builder.checkpoints.resolve import resolve
from builder.common.errors import ExportError, VerificationError
from builder.engines import infer_with
from builder.graphs.export.encoder import export, export_module, task_graph
from builder.graphs.export.rows import rows_of
from builder.options import make_spec
from tests.tiny_encoders import make_checkpoint

ONE: dict[str, Any] = {"num_hidden_layers": 1}


@pytest.mark.slow
def test_cause_names_a_branch_on_length(tmp_path: Path) -> None:
    """BigBird switches permanently to full attention at the first text of at most (5 + 2 * 1) * 8 tokens."""
    folder = make_checkpoint(tmp_path / "c", "big_bird", "text-classification")
    with pytest.raises(VerificationError, match=r"up to 56 tokens and not at 57: .* Build it with --max-length 56"):
        build(make_spec(model=str(folder), name="m", output=tmp_path / "r", max_length=128))
    spec = make_spec(model=str(folder), max_length=56)
    checkpoint = resolve(spec)
    rows = rows_of(checkpoint)
    long = long_references(task_graph(checkpoint), rows, checkpoint.max_length)
    exported = export(checkpoint, tmp_path)
    infer = infer_with(exported.graph, 1)
    assert [reference.lengths for reference in long] == [(56,)]
    assert error_at(infer, exported.graph, long[0], per_token=False) < TOLERANCE
    assert cause(exported.graph, exported.module, rows, checkpoint, spec.build_threads) == BUG


def test_length_that_pytorch_cannot_answer_is_refused(tmp_path: Path) -> None:
    """Regression: BigBird pads 60 tokens to whole blocks of 64, beyond its 61 positions, which caused a traceback."""
    folder = make_checkpoint(tmp_path / "c", "big_bird", "text-classification", max_position_embeddings=61, **ONE)
    spec = make_spec(model=str(folder), name="m", output=tmp_path / "r", max_length=60)
    with pytest.raises(VerificationError, match=r"big_bird does not answer a text of 60 tokens: .*size.*--max-length"):
        build(spec)


def test_cause_names_random_numbers(tmp_path: Path) -> None:
    """Reformer draws random hash planes for each text."""
    folder = make_checkpoint(tmp_path / "c", "bert", "text-classification", **ONE)
    spec = make_spec(model=str(folder), max_length=64)
    checkpoint = resolve(spec)
    module = task_graph(checkpoint)
    rows, graph = rows_of(checkpoint), export_module(module, rows_of(checkpoint), tmp_path / "model.onnx")
    checkpoint.model.classifier.register_forward_hook(lambda *called: called[-1] + torch.rand(()))
    named = cause(graph, module, rows, checkpoint, spec.build_threads)
    assert re.match(r"PyTorch itself answers the same text differently each time, .* random numbers", named)


def test_cause_names_code_that_branches_on_a_text(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "longformer", "text-classification", **ONE)
    spec = make_spec(model=str(folder), max_length=64)
    with pytest.raises(ExportError, match=r"branches on the values of a text.*modeling_longformer\.py, line \d+"):
        export(resolve(spec), tmp_path)


def test_long_references_exceed_the_usual_lengths(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "roberta", "text-classification")
    spec = make_spec(model=str(folder))
    checkpoint = resolve(spec)
    module, rows = task_graph(checkpoint), rows_of(checkpoint)
    lengths = {n: [r.lengths[0] for r in long_references(module, rows, n)] for n in (40, 301, 512, 513)}
    assert lengths == {40: [40], 301: [301], 512: [512, 511], 513: [513, 512]}


def test_long_rows_leave_two_remainders_in_blocks() -> None:
    """The last block is padded in another way for each; rows of 1024 and 1023 tokens took twice as long as these."""
    assert long_lengths(1024) == (1024, 511)
    for longest in range(302, 1100):
        first, second = long_lengths(longest)
        assert first == longest
        assert second > USUAL
        assert (longest - second) % 64 == 1
    for block in (64, 128, 256, 512):
        assert all((longest - long_lengths(longest)[1]) % block == 1 for longest in range(8 * block, 9000))
    assert all(sum(long_lengths(longest)) < 1.625 * longest for longest in range(768, 9000))
