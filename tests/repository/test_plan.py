"""Plans that another machine compiles: the build's files, refusals before compilation, and the publication.

There is no TensorRT and no GPU here: `FakeMachine` stands for them. The comparison is polygraphy's own, with ONNX
Runtime in TensorRT's place.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import polygraphy.backend.trt as trt_backend
import pytest
from onnx import numpy_helper
from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
from polygraphy.exception import PolygraphyException

from builder import build
from builder.cli import main
from builder.common.cards import GpuModel
from builder.common.errors import SpecError
from builder.engines.onnxruntime import open_session
from builder.options import make_spec
from builder.repository import versions
from builder.repository.check import check, pending
from builder.repository.lint.rules import plans
from builder.runtime.recipe import compile as program
from tests.tiny_encoders import make_checkpoint
from tests.versions import copy_version

H200 = {"tensorrt": "10.5.0.18", "gpu": "NVIDIA H200", "compute_capability": "9.0"}


@pytest.fixture(scope="module")
def built(module_folder: Callable[[str], Path]) -> Path:
    """Build a repository with one plan that is not compiled yet."""
    folder = module_folder("plan")
    checkpoint = make_checkpoint(folder / "checkpoint", "bert", "feature-extraction")
    output = folder / "repository"
    options = {"target": "tensorrt", "precision": "fp16", "max_batch_size": 8, "max_length": 64, "triton": "24.10"}
    build(make_spec(model=str(checkpoint), name="texts", task="feature-extraction", output=output, **options))
    return output


@pytest.fixture
def repository(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "repository"))


@dataclass
class FakeMachine:
    """GPU machine whose TensorRT writes `content` as a plan."""

    fingerprint: dict[str, str]
    content: bytes = b"plan"

    def this_machine(self) -> dict[str, str]:
        return dict(self.fingerprint)

    def build(self, recipe: Path, options: dict[str, Any], plan: Path) -> float:
        plan.write_bytes(self.content)
        return 0.001


def _on(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "this_machine", machine.this_machine)
    monkeypatch.setattr(program, "build", machine.build)


def _recipe(repository: Path) -> Path:
    return repository / "texts_model" / "1" / "recipe"


def test_gpu_build_writes_all_but_the_plan_and_names_it(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not (repository / "texts_model" / "1" / "model.plan").exists()
    assert check(repository) == []
    (line,) = pending(repository).values()
    assert line.startswith("texts_model: its plan is not compiled yet")
    assert main(["check", str(repository)]) == 1
    assert "build-repo compile" in capsys.readouterr().err
    assert main(["serve", str(repository)]) == 1
    assert "its plan is not compiled yet" in capsys.readouterr().err


def test_recipe_has_graph_profiles_and_expected_answers(repository: Path) -> None:
    recipe = json.loads((_recipe(repository) / "recipe.json").read_text())
    assert (recipe["triton"], recipe["tensorrt"], recipe["precision"]) == ("24.10", "10.5", "fp16")
    assert recipe["profiles"][0]["input_ids"] == {"min": [1, 1], "opt": [8, 32], "max": [8, 64]}
    model = onnx.load(str(_recipe(repository) / "model.onnx"))
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}, "TensorRT has standard operators alone"
    assert any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer)
    assert {value.name for value in open_session(_recipe(repository) / "model.onnx", 1).get_inputs()} == set(
        recipe["profiles"][0]
    )


@pytest.mark.parametrize("emitted", [False, True], ids=["verb", "emitted program"])
def test_compile_without_tensorrt_gives_advice_in_one_line(repository: Path, emitted: bool) -> None:
    if emitted:
        arguments = [sys.executable, str(_recipe(repository) / "compile.py")]
    else:
        call = "import sys; from builder.cli import main; sys.exit(main(['compile', sys.argv[1]]))"
        arguments = [sys.executable, "-c", call, str(repository)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no tensorrt here" in done.stderr
    assert "docker compose" in done.stderr
    assert "Traceback" not in done.stderr


def test_compile_publishes_a_plan_once_with_its_fingerprint(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _on(FakeMachine(H200), monkeypatch)
    assert main(["compile", str(repository)]) == 0
    assert "compiled for NVIDIA H200 by TensorRT 10.5.0.18" in capsys.readouterr().err
    assert (repository / "texts_model" / "1" / "model.plan").read_bytes() == b"plan"
    assert sorted(path.name for path in (repository / "texts_model").iterdir()) == [
        "1", "build.json", "config.pbtxt", "warmup"
    ]  # fmt: skip
    for name in ("texts", "texts_model"):
        document = json.loads((repository / name / "build.json").read_text())
        assert document["plan"]["gpu"] == "NVIDIA H200"
        assert document["files"]["texts_model"]["1/model.plan"] == document["plan"]["sha256"]
    assert check(repository) == []
    assert pending(repository) == {}
    _on(FakeMachine(H200, b"another"), monkeypatch)
    assert main(["compile", str(repository)]) == 0
    assert "up to date" in capsys.readouterr().err
    assert (repository / "texts_model" / "1" / "model.plan").read_bytes() == b"plan"


def test_compile_serves_the_version_of_the_plan(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "OVERLAP_S", 0)
    _on(FakeMachine(H200), monkeypatch)
    assert main(["compile", str(repository)]) == 0
    copy_version(repository, "texts", 2)
    assert list(pending(repository, unserved=True)) == ["texts_model"]
    assert main(["compile", str(repository)]) == 0
    assert "texts: version 2 is served now" in capsys.readouterr().err
    assert versions.loaded_numbers(repository / "texts") == versions.loaded_numbers(repository / "texts_model") == [2]
    assert check(repository) == []


def test_compile_for_another_gpu_keeps_the_old_plan_if_it_fails(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(FakeMachine(H200), monkeypatch)
    assert program.compile_plan(_recipe(repository)) is not None
    other = {**H200, "gpu": "NVIDIA L4", "compute_capability": "8.9"}
    _on(FakeMachine(other), monkeypatch)

    def failing(recipe: Path, options: dict[str, Any], plan: Path) -> float:
        plan.write_bytes(b"half")
        raise program.CompileError("it answers otherwise")

    monkeypatch.setattr(program, "build", failing)
    with pytest.raises(program.CompileError):
        program.compile_plan(_recipe(repository))
    assert (repository / "texts_model" / "1" / "model.plan").read_bytes() == b"plan"
    assert check(repository) == []
    _on(FakeMachine(other, b"for the other"), monkeypatch)
    fingerprint = program.compile_plan(_recipe(repository))
    assert fingerprint is not None
    assert fingerprint["gpu"] == "NVIDIA L4"
    assert (repository / "texts_model" / "1" / "model.plan").read_bytes() == b"for the other"


KILLED = """
import importlib.util, json, os, sys
from pathlib import Path

recipe, number, content = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
spec = importlib.util.spec_from_file_location("program", recipe / "compile.py")
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
program.this_machine = lambda: json.loads(sys.argv[4])
program.build = lambda recipe, asked, plan: plan.write_text(content) and 0.001
calls = 0

def counted(function):
    def call(*arguments, **options):
        global calls
        if calls == number:
            os._exit(137)
        calls += 1
        return function(*arguments, **options)
    return call

for name in ("rename", "replace"):
    setattr(program.os, name, counted(getattr(os, name)))
program.shutil.rmtree = counted(program.shutil.rmtree)
program.compile_plan(recipe)
"""


@pytest.mark.parametrize("moment", range(6))
def test_killed_compile_leaves_the_old_plan_or_the_new_one(
    moment: int, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**H200, "gpu": "NVIDIA L4", "compute_capability": "8.9"}
    _on(FakeMachine(H200, b"old"), monkeypatch)
    program.compile_plan(_recipe(repository))
    plan = repository / "texts_model" / "1" / "model.plan"
    arguments = [sys.executable, "-c", KILLED, str(_recipe(repository)), str(moment), "new", json.dumps(other)]
    ended = subprocess.run(arguments, capture_output=True, text=True)
    assert ended.returncode in (0, 137), ended.stderr
    assert plan.read_bytes() in (b"old", b"new"), "whoever starts Triton now finds a plan"

    def failing(recipe: Path, options: dict[str, Any], plan: Path) -> float:
        raise program.CompileError("no memory")

    before = plan.read_bytes()
    _on(FakeMachine({**H200, "gpu": "NVIDIA A10"}), monkeypatch)
    monkeypatch.setattr(program, "build", failing)
    with pytest.raises(program.CompileError):
        program.compile_plan(_recipe(repository))
    assert plan.read_bytes() == before, "and a next run that fails takes it from nobody"
    _on(FakeMachine(H200, b"again"), monkeypatch)
    program.compile_plan(_recipe(repository))
    assert plan.read_bytes() in (b"old", b"again"), "a plan of another machine is never taken for this one's"
    assert check(repository) == []


@pytest.mark.parametrize(
    ("fingerprint", "gpu", "triton", "message"),
    [
        (H200, "NVIDIA L4", None, "compiled for NVIDIA H200 and this machine has NVIDIA L4"),
        ({**H200, "tensorrt": "10.9.0.34"}, "NVIDIA H200", None, "compiled by TensorRT 10.9.0.34 and Triton 24.10 has"),
        (H200, "NVIDIA H200", "25.03", "compiled by TensorRT 10.5.0.18 and Triton 25.03 has 10.9"),
    ],
)
def test_check_refuses_a_plan_of_another_gpu_or_tensorrt(
    fingerprint: dict[str, str],
    gpu: str,
    triton: str | None,
    message: str,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _on(FakeMachine(fingerprint), monkeypatch)
    program.compile_plan(_recipe(repository))
    monkeypatch.setattr(plans, "gpus", lambda: (GpuModel(gpu, "9.0", 1),))
    (problem,) = check(repository, triton)
    assert message in problem
    assert "build-repo compile" in problem


def test_compile_refuses_a_changed_graph(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on(FakeMachine(H200), monkeypatch)
    (_recipe(repository) / "model.onnx").write_bytes(b"other")
    with pytest.raises(program.CompileError, match="not the graph that was built"):
        program.compile_plan(_recipe(repository))


def test_compile_refuses_a_gpu_too_old_for_the_precision(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on(FakeMachine({**H200, "gpu": "Tesla V100", "compute_capability": "7.0"}), monkeypatch)
    with pytest.raises(program.CompileError, match=r"fp16 needs a GPU of compute capability 7.5; Tesla V100 has 7.0"):
        program.compile_plan(_recipe(repository))


def test_compile_accepts_only_a_plan_that_answers_like_onnx_runtime(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = _recipe(repository)
    options = json.loads((recipe / "recipe.json").read_text())

    def runner(engine: Any, optimization_profile: int) -> OnnxrtRunner:
        return OnnxrtRunner(SessionFromOnnx(engine))

    monkeypatch.setattr(trt_backend, "TrtRunner", runner)
    error = program.compare(recipe, options, str(recipe / "model.onnx"), 0)
    assert error is not None
    assert error < 5e-3, "what stands for TensorRT runs fp16 in fp32, and the recorded answers are rounded to fp16"
    options["profiles"].append({name: {**sides, "min": [99, 99]} for name, sides in options["profiles"][0].items()})
    assert program.compare(recipe, options, str(recipe / "model.onnx"), 1) is None, "it takes no recorded call"
    wrong = onnx.load(str(recipe / "model.onnx"))
    largest = max(wrong.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    largest.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(largest)[::-1].copy(), largest.name))
    onnx.save(wrong, str(recipe / "wrong.onnx"))
    with pytest.raises(program.CompileError, match="answers otherwise than ONNX Runtime"):
        program.compare(recipe, options, str(recipe / "wrong.onnx"), 0)


class FakeTensorRT(ModuleType):
    """Fake of the module `tensorrt` as far as `build` reads it; `_fake_tensorrt` replaces polygraphy's functions."""

    __version__ = "10.5.0.18"
    MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)


class ProfiledRunner(OnnxrtRunner):  # type: ignore[misc]  # where mypy does not read polygraphy
    """Runner on ONNX Runtime that refuses shapes outside the profile, like TensorRT's execution contexts.

    Rule: IExecutionContext.setInputShape, "the dimensions must be within the optimization profile's min and max".
    """

    def __init__(self, engine: str, profile: Any) -> None:
        super().__init__(SessionFromOnnx(engine))
        self.profile = profile

    def infer_impl(self, feed_dict: Any) -> Any:
        for name, array in feed_dict.items():
            least, _, most = self.profile[name]
            if not all(low <= size <= high for low, size, high in zip(least, array.shape, most, strict=True)):
                raise PolygraphyException(f"{name} of {array.shape} is outside of its profile, {least} to {most}")
        SHAPES.append(feed_dict["input_ids"].shape)
        return super().infer_impl(feed_dict)


SHAPES: list[tuple[int, ...]] = []  # that ProfiledRunner ran


def _fake_tensorrt(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace TensorRT by ONNX Runtime, where an engine is the path of its graph. Return the recorded calls."""
    calls: dict[str, Any] = {}

    def network(path: str, strongly_typed: bool) -> str:
        calls["strongly_typed"] = strongly_typed
        if "broken" in Path(path).read_bytes()[:20].decode("latin1"):
            raise PolygraphyException("Could not parse")
        return path

    def engine(network: str, config: Any, save_timing_cache: str) -> str:
        calls.update(config=config, timings=save_timing_cache)
        Path(save_timing_cache).write_bytes(b"timings")
        return network

    def runner(engine: str, optimization_profile: int) -> OnnxrtRunner:
        calls.setdefault("profiles", []).append(optimization_profile)
        return ProfiledRunner(engine, calls["config"].profiles[optimization_profile])

    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRT("tensorrt"))
    monkeypatch.setattr(trt_backend, "network_from_onnx_path", network)
    monkeypatch.setattr(trt_backend, "engine_from_network", engine)
    monkeypatch.setattr(trt_backend, "save_engine", lambda engine, path: Path(path).write_bytes(b"plan"))
    monkeypatch.setattr(trt_backend, "TrtRunner", runner)
    return calls


def test_plan_is_strongly_typed_and_compared_in_each_profile(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _fake_tensorrt(monkeypatch)
    monkeypatch.setattr(program, "this_machine", lambda: dict(H200))
    SHAPES.clear()
    fingerprint = program.compile_plan(_recipe(repository))
    assert {(8, 32), (8, 64)} <= set(SHAPES), "compared where it is tuned and at its end"
    assert calls["config"].tf32 is False
    assert fingerprint is not None
    assert fingerprint["error"] < 5e-3
    assert calls["strongly_typed"] is True
    (profile,) = calls["config"].profiles
    assert tuple(profile["input_ids"]) == ((1, 1), (8, 32), (8, 64))
    assert calls["profiles"] == [0]
    assert calls["timings"] == str(_recipe(repository) / "timing.cache")
    assert check(repository) == []


def test_compile_of_an_unsupported_graph_is_an_error_without_traceback(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_tensorrt(monkeypatch)
    recipe = _recipe(repository)
    options = json.loads((recipe / "recipe.json").read_text())
    (recipe / "model.onnx").write_bytes(b"broken")
    with pytest.raises(program.CompileError, match=r"TensorRT 10.5.0.18 does not compile this graph"):
        program.build(recipe, options, recipe / "model.plan")


def test_compile_does_not_publish_a_plan_without_comparison(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_tensorrt(monkeypatch)
    recipe = _recipe(repository)
    options = json.loads((recipe / "recipe.json").read_text())
    options["profiles"] = [{n: {side: [3, 3] for side in ("min", "opt", "max")} for n in options["profiles"][0]}]
    with pytest.raises(program.CompileError, match="no profile takes a recorded call"):
        program.build(recipe, options, recipe / "model.plan")


def test_build_refuses_a_release_with_old_tensorrt_and_names_another() -> None:
    from builder.building.variants.candidates import requested_variants

    with pytest.raises(SpecError, match=r"Triton 24.04 has TensorRT 8.6.*--triton 24.05 or later"):
        requested_variants(make_spec(model="x", target="tensorrt", triton="24.04"), [])


def test_gpu_target_refuses_unsupported_options_by_name() -> None:
    from builder.building.variants.candidates import requested_variants

    with pytest.raises(SpecError, match=r"onnxruntime has no int8 for --target cuda; it has fp32, fp16, bf16"):
        requested_variants(make_spec(model="x", target="cuda", precision="int8"), [])
    with pytest.raises(SpecError, match="--precision auto measures"):
        requested_variants(make_spec(model="x", target="cuda", precision="auto"), [])
    with pytest.raises(SpecError, match=r"--target cuda has no --engine openvino"):
        make_spec(model="x", target="cuda", engine="openvino")
    with pytest.raises(SpecError, match=r"no engine has fp8 on a CPU; --target tensorrt has"):
        requested_variants(make_spec(model="x", precision="fp8"), [])
    assert make_spec(model="x", engine="tensorrt").target == "tensorrt"
