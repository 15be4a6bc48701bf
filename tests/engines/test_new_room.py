"""An engine that only its own folder knows goes through the whole pipeline; nothing else of the builder names one."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from builder import engines
from builder.building.pipeline import build
from builder.building.verify.recording import graph_case
from builder.building.verify.runtimes import replayed
from builder.engines.encoding import all_variants
from builder.graphs.onnx.graph import Graph, save_graph
from builder.options import make_spec
from builder.repository.config.render import parse
from builder.repository.layout.emitted import encoder_files
from builder.repository.report.record import read_report
from builder.runtime.contract import load_encoder
from tests.servings import encoder_serving

BUILDER = Path(engines.__file__).parent.parent
ROOMS = Path(__file__).parent / "rooms"
NAMING = {  # the files beside the engines' own that may name one
    "repository/lint/repository.py",  # Triton's backends, in repositories of any author
    "repository/lint/rules/fronts.py",
    "repository/lint/rules/plans.py",
    "repository/lint/rules/structure.py",
    "repository/lint/rules/versions.py",
    "common/releases.py",  # and in its releases
    "options/build_spec.py",  # the engines that can be requested, and with which target
    "options/choices.py",
    "graphs/onnx/graph.py",  # the default target of an export
    "repository/report/record.py",
    "repository/report/provenance.py",  # the libraries whose versions are recorded
    "runtime/contract.py",  # the default engine of a decode loop
    "runtime/recipe/compile.py",  # plans, which have a verb
    "commands/compile.py",
    "building/families/decoder/drafted.py",  # whose 8-bit cache does not guess
}


@pytest.fixture
def identity(tmp_path: Path) -> Graph:
    """Return a graph for the new engine, which returns its input."""
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", sides[:1], sides[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return replace(save_graph(model, tmp_path / "model.onnx"), engine="echo")


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(ROOMS)])
    yield "echo"
    for name in [name for name in sys.modules if name.startswith("builder.engines.echo")]:
        del sys.modules[name]
    vars(engines).pop("echo", None)


def test_an_engine_that_only_its_room_knows_is_built_verified_and_published(
    echo: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"text_input": "One fox."}\n{"text_input": "Two boxes of it."}\n')
    spec = make_spec(
        model=str(checkpoint("topics")), name="t", output=tmp_path / "r", samples=samples, executor="bls", threads=1
    )
    build(spec.model_copy(update={"engine": echo}))
    config = parse((tmp_path / "r" / "t_model" / "config.pbtxt").read_text(), "t_model")
    assert (config.backend, config.default_model_filename) == (echo, "model.echo")
    assert config.parameters["longest"].string_value == str(load_encoder(tmp_path / "r" / "t" / "1").max_length)
    assert (tmp_path / "r" / "t_model" / "1" / "model.echo").is_file()
    assert load_encoder(tmp_path / "r" / "t" / "1").not_on_cpus_with == ("an-instruction-set",)
    report = read_report(tmp_path / "r", "t")
    assert (report.engine, report.chosen) == (echo, "fp32 Echo")
    assert [(check.engine, check.verified) for check in report.verified_on] == [("onnxruntime", True)]


def test_its_calls_are_made_again_as_its_room_says(echo: str, identity: Graph, tmp_path: Path) -> None:
    case = graph_case(identity, [{"x": np.zeros((2, 3), np.float32)}], 1)
    (answers,) = replayed(tmp_path, [case.job])
    assert isinstance(answers, list), answers
    whole, first = answers
    assert whole["y"].tolist() == [[1, 1, 1]] * 2
    assert first["y"].tolist() == [[1, 1, 1]]


def test_emitted_files_include_what_the_executor_imports() -> None:
    files = {name: encoder_files(encoder_serving(executor=name)) for name in ("onnxruntime", "openvino", "bls")}
    assert "1/sessions.py" in files["onnxruntime"]
    assert "1/sessions.py" not in {*files["openvino"], *files["bls"]}
    assert "1/cores.py" in files["openvino"]


def test_no_other_file_names_an_engine() -> None:
    names = {variant.engine for variant in all_variants()}
    naming = {
        str(path.relative_to(BUILDER))
        for path in BUILDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in names and not path.is_relative_to(BUILDER / "engines")
    }
    assert naming == NAMING
