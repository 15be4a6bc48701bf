"""On a real GPU with TensorRT: a plan is compiled, compared and published by `build-repo compile`."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder import build, make_spec
from builder.cli import main
from builder.repository.check import check, pending
from tests.models import minilm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8-static", "fp8"])
def test_compiled_plan_answers_as_onnx_runtime(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt")
    options = {"target": "tensorrt", "precision": precision, "triton": "25.08", "max_batch_size": 8, "max_length": 64}
    build(make_spec(model=str(minilm()), name="minilm", output=tmp_path, **options))
    assert pending(tmp_path)
    assert main(["compile", str(tmp_path)]) == 0
    assert check(tmp_path) == []
    assert pending(tmp_path) == {}
    assert (tmp_path / "minilm_model" / "1" / "model.plan").stat().st_size > 1_000_000
