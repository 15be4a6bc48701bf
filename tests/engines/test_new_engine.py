"""A new engine needs only a package and an executor; no other module names an engine."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from builder import engines
from builder.common.engines import ENGINES
from builder.repository.config.render import parse
from builder.repository.layout.emitted import encoder_files
from builder.repository.report.record import read_report
from builder.runtime.contract import load_encoder
from tests.servings import encoder_serving

BUILDER = Path(engines.__file__).parent.parent
NEW = Path(__file__).parent / "new_engine"
NAME = "echo"
COMMAND = ("-c", "import sys; from builder.cli import main; sys.exit(main())")
OPEN = "import sys; from pathlib import Path; from builder.runtime.encoder.front import open_front; "
OPEN += "open_front(Path(sys.argv[1]))"  # runs the executor, which a build does not
NAMING = {  # modules outside the engines that may name one, with the reason
    "common/releases.py": "the table of Triton's releases has a column of versions for each",
    "graphs/onnx/graph.py": "an exported graph has ONNX Runtime's operators until an engine translates it",
    "options/build_spec.py": "TensorRT is also a target, and has a section of models.yaml",
    "options/choices.py": "TensorRT is also a target",
    "repository/lint/rules/plans.py": "what `compile` writes about a plan, in build.json",
    "commands/compile.py": "the same",
    "runtime/recipe/compile.py": "the same",
    "runtime/contract.py": "a serving.json that was written before it named the engine",
}


@pytest.fixture(scope="module")
def extended(module_folder: Callable[[str], Path]) -> Path:
    """Return a copy of the source with one more engine: a folder, and the executor for its fronts."""
    root = module_folder("extended")
    for folder in (BUILDER, BUILDER.parent / "templates"):
        shutil.copytree(folder, root / folder.name)  # with its compiled modules
    shutil.copytree(NEW / NAME, root / "builder" / "engines" / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(NEW / "executor.py", root / "builder" / "runtime" / "encoder" / "executors" / f"{NAME}.py")
    return root


def run(root: Path, *arguments: object) -> str:
    """Run Python with the copy of the source, and return its output."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("executor", ["in-process", "bls"])
def test_new_engine_is_built_verified_and_published(
    executor: str, extended: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    samples, repository = tmp_path / "samples.jsonl", tmp_path / "r"
    samples.write_text('{"text_input": "One fox."}\n{"text_input": "Two boxes of it."}\n')
    options = ["--engine", NAME, "--name", "t", "--output", repository, "--samples", samples, "--threads", "1"]
    run(extended, *COMMAND, checkpoint("topics"), *options, "--executor", executor)
    serving = load_encoder(repository / "t" / "1")
    if executor == "bls":
        config = parse((repository / "t_model" / "config.pbtxt").read_text(), "t_model")
        assert (config.backend, config.default_model_filename) == (NAME, "model.echo")
        assert config.parameters["longest"].string_value == str(serving.max_length)
        assert (repository / "t_model" / "1" / "model.echo").is_file()
        assert serving.not_on_cpus_with == ("an-instruction-set",)
    else:
        assert (serving.executor, serving.model) == (NAME, "model.echo")
        assert (repository / "t" / "1" / "model.echo").is_file()
        assert (repository / "t" / "1" / "encoder" / "executors" / "echo.py").is_file()
        run(extended, "-c", OPEN, repository / "t" / "1")
    report = read_report(repository, "t")
    assert (report.engine, report.chosen) == (NAME, "fp32 Echo")
    assert [(check.engine, check.verified) for check in report.verified_on] == [("onnxruntime", True)]


def test_new_engine_is_a_choice_of_the_command_line(extended: Path) -> None:
    assert NAME not in ENGINES
    assert NAME in run(extended, *COMMAND, "--help")


def test_replay_file_of_the_new_engine_repeats_recorded_calls(extended: Path, tmp_path: Path) -> None:
    whole, first = json.loads(run(extended, NEW / "replays.py", tmp_path))
    assert whole == [[1, 1, 1]] * 2
    assert first == [[1, 1, 1]]


def test_emitted_files_include_what_the_executor_imports() -> None:
    files = {name: encoder_files(encoder_serving(executor=name)) for name in ("onnxruntime", "openvino", "bls")}
    assert "1/sessions.py" in files["onnxruntime"]
    assert "1/sessions.py" not in {*files["openvino"], *files["bls"]}
    assert "1/cores.py" in files["openvino"]


def test_only_files_with_a_reason_name_an_engine() -> None:
    names = {name for name, facts in ENGINES.items() if facts.targets and not facts.runs_checkpoint}
    naming = {
        str(path.relative_to(BUILDER))
        for path in BUILDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in names and not path.is_relative_to(BUILDER / "engines")
    }
    assert naming == set(NAMING)


def test_shared_modules_of_the_engines_name_no_engine() -> None:
    modules = [ast.parse(path.read_text("utf-8")) for path in (BUILDER / "engines").glob("*.py")]
    words = {node.value for module in modules for node in ast.walk(module) if isinstance(node, ast.Constant)}
    assert not words & set(ENGINES) - {"cuda", "tensorrt"}  # which are targets, too
