"""Equal checkpoints and specifications give equal files; only the report contains measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.building.pipeline import build
from builder.options import make_spec
from builder.repository.check import check


@pytest.mark.slow
def test_equal_builds_give_equal_files(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    trees = []
    for turn in ("one", "two"):
        output = tmp_path / turn / "model_repository"
        build(make_spec(model=str(checkpoint("flags")), name="flags", output=output))
        assert check(output) == []
        trees.append({str(p.relative_to(output)): p.read_bytes() for p in output.rglob("*") if p.is_file()})
    assert "flags/1/model.onnx" in trees[0]
    for tree in trees:  # they contain times; those of the served version are also stored beside it
        assert len(tree["flags/report.html"]) > 1000
        for name in ("report.html", "build.json"):
            assert tree.pop(f"flags/{name}") == tree[f"flags/1/{name}"]
        del tree["flags/1/report.html"]
    for tree in trees:  # it contains the measurements too
        for name in ("flags/config.pbtxt", "flags/1/config.pbtxt"):
            tree[name], count = re.subn(rb'\nparameters \{ key: "report" .*', b"", tree[name])
            assert count == 1
    reports = [json.loads(tree.pop("flags/1/build.json")) for tree in trees]
    assert trees[0] == trees[1]
    assert reports[0]["files"] == reports[1]["files"]
    assert reports[0]["checkpoint"]["source"] == "flags-checkpoint"
    assert len(reports[0]["checkpoint"]["weights_sha256"]) == 64
    for measured in reports[0]["ladder"]:
        assert set(measured["latency_ms"]) == {f"{b}x{n}" for b in (1, 8) for n in (16, 64, 128)}
        assert all(ms > 0 for ms in measured["latency_ms"].values())


def test_check_names_a_graph_that_a_release_cannot_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    import onnx

    output = tmp_path / "model_repository"
    build(make_spec(model=str(checkpoint("flags")), name="flags", output=output, triton="24.10", executor="bls"))
    path = output / "flags_model" / "1" / "model.onnx"
    model = onnx.load(str(path))
    model.ir_version = 11
    path.write_bytes(model.SerializeToString())
    problems = check(output)
    assert any("IR version 11; Triton 24.10" in problem and "Build for Triton 25.08" in problem for problem in problems)
    assert not any("IR version" in problem for problem in check(output, "25.08"))
    (output / "flags" / "config.pbtxt").write_text('name: "flags" max_batchsize: 3')
    assert any("not a Triton model configuration" in problem for problem in check(output))
