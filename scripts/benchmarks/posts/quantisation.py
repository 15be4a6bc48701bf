"""Quantisation (post 4): dynamic and static on a real model; mBART and t5-small as `scripts/bench seq2seq` found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builder.spec import make_spec
from builder.stages import build
from scripts.benchmarks.posts import Row, alone
from tests.models import minilm

RECORDED = Path(__file__).parent.parent.parent.parent / "docs" / "seq2seq.json"
RUNGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16 OpenVINO", {"precision": "bf16"}),
    ("dynamic int8", {"precision": "int8"}),
    ("static int8, not smoothed", {"precision": "int8-static", "calibration": {"smooth": 0.0}}),
    ("static int8", {"precision": "int8-static"}),
    ("static int8, entropy", {"precision": "int8-static", "calibration": {"method": "entropy"}}),
    ("static int8 OpenVINO", {"precision": "int8-static", "engine": "openvino"}),
)


def static_and_dynamic(place: Path, environments: Path) -> list[Row]:
    """The real MiniLM, 8 texts of 128 tokens: milliseconds and mean cosine to PyTorch."""
    rows = []
    for title, options in RUNGS:
        spec = make_spec(model=str(minilm()), name="minilm", output=place / "minilm", quality=0.9, **options)
        base, exact, *rest = alone(build, spec).ladder
        if not rows:
            rows.append(Row("PyTorch", f"{base.latency_ms['8x128']:.0f} ms, cosine 1", 1.0))
            ratio = base.latency_ms["8x128"] / exact.latency_ms["8x128"]
            rows.append(Row("fused fp32", f"{exact.latency_ms['8x128']:.0f} ms, cosine 1.0000", ratio))
        ms = rest[-1].latency_ms["8x128"]
        ratio = base.latency_ms["8x128"] / ms
        rows.append(Row(title, f"{ms:.0f} ms, cosine {rest[-1].quality:.4f}", ratio))
    return rows


def encoder_decoders(place: Path, environments: Path) -> list[Row]:
    """One client, greedy, tokens a second; recorded by `scripts/bench seq2seq`."""
    claims = {("mbart-large-50", "transformers dynamic int8"): "3.7x", ("t5-small", "ours fp32"): "2.7x by Optimum O3"}
    rows = []
    for model, sides in json.loads(RECORDED.read_text())["models"].items():
        if model not in ("mbart-large-50", "t5-small"):
            continue
        base = sides["transformers eager"]["1/1"]["tokens_per_s"]
        for side, cells in sides.items():
            found = cells.get("1/1", {}).get("tokens_per_s")
            if found is not None:
                claim = claims.get((model, side), "")
                rows.append(Row(f"{model}, {side}", f"{found:.0f} tokens/s", found / base, claim))
    return rows
