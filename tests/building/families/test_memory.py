"""A build needs memory for about one copy of its weights, besides that of the libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.building.families import MAPPED
from builder.building.pipeline import build
from builder.common.errors import BuilderError
from builder.engines.onnxruntime import MAPPED as LEFT_IN_FILE
from builder.graphs.onnx.graph import Graph, save_graph
from builder.options import make_spec
from builder.runtime.contract import Session
from builder.runtime.sessions import open_session
from tests.decoders import make_decoder_checkpoint

WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
AT_MOST = 3.0  # times the fp32 weights; above 4 if every stage had its own copy

BUILD = """
import json, sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from builder.checkpoints.resolve import resolve
from builder.graphs.export.decoder import export_decoder
from builder.clusters.fleet.work import peak_memory, reset_peak_memory
from builder.engines.optimise.fusion import fuse
from builder.building.pipeline import build
from builder.options import make_spec
from builder.building.variants import timing

timing.warm_ms = timing.median_ms = lambda call, share=0.0: [call(), 1.0][1]  # run once: times do not matter here
tiny, wide, output, samples = sys.argv[1:]
options = {"quality": 0.0, "perplexity": 1e9, "slots": 1, "max_length": 64, "samples": samples, "output": output}
model = resolve(make_spec(model=tiny, name="tiny", **options)).model
made = Path(tiny)
fuse(export_decoder(model, made, 64).graph, made)  # loads the libraries of an export
found = {"libraries": peak_memory()}

@contextmanager
def stage(name):
    reset_peak_memory()
    yield
    found[name] = peak_memory()

build(make_spec(model=wide, name="wide", **options), stage)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_build_holds_about_one_copy_of_the_weights(tmp_path: Path) -> None:
    """Every copy of the weights in a stage would add their size."""
    tiny, wide, output = (tmp_path / name for name in ("tiny", "wide", "repository"))
    make_decoder_checkpoint(tiny, "llama")
    make_decoder_checkpoint(wide, "llama", **WIDE)
    output.mkdir()
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"text_input": "A fox jumps over a dog."}\n')
    weights = sum(file.stat().st_size for file in wide.glob("*.safetensors"))
    command = [sys.executable, "-c", BUILD, *map(str, (tiny, wide, output, samples))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peaks = json.loads(done.stdout.splitlines()[-1])
    base = peaks.pop("libraries")
    times = {stage: round((peak - base) / weights, 2) for stage, peak in peaks.items()}
    assert max(times.values()) < AT_MOST, f"times the weights, beside {base / 1e6:.0f} MB: {times}"


WIDTH = 4096


def product(path: Path) -> Graph:
    """Return a graph that multiplies by a square matrix of 64 MiB."""
    value = helper.make_tensor_value_info
    matrix = numpy_helper.from_array(np.ones((WIDTH, WIDTH), np.float32), "w")
    sides = (value("x", TensorProto.FLOAT, ["rows", WIDTH]), value("y", TensorProto.FLOAT, ["rows", WIDTH]))
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    graph = helper.make_graph([node], "g", [sides[0]], [sides[1]], [matrix])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return save_graph(model, path)


LOOK = """
import select, sys
import psutil
watched = psutil.Process(int(sys.argv[1]))
print("looking", flush=True)
highest = 0
while not select.select([sys.stdin], [], [], 0.001)[0]:
    memory = watched.memory_info()
    highest = max(highest, memory.rss - memory.shared)
print(highest)
"""

TAKEN = """
import json, os, subprocess, sys
from pathlib import Path
import psutil
import builder.graphs.onnx.graph as graphs
from builder.engines import onnxruntime
from builder.engines.decoding import opened
from builder.engines.optimise.compaction import compact
from builder.engines.optimise.quantisation import quantise
from tests.building.families.test_memory import LOOK, product

def own_memory():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared

def most(call):
    "The most memory of its own that the process has while `call` runs and its result is kept, beside what it had."
    before = own_memory()
    command = [sys.executable, "-c", LOOK, str(os.getpid())]
    looking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    looking.stdout.readline()
    kept.append(call())
    highest, _ = looking.communicate()
    return max(int(highest), own_memory()) - before

graphs.EXTERNAL_FROM = 10_000
place = Path(sys.argv[1])
graph = product(place / "model.onnx")
kept = [opened(graph, 1)]  # allocates the memory of a process's first session
print(json.dumps({
    "size": graph.size,
    "judged": most(lambda: opened(graph, 1, mapped=True)),
    "an encoder judged": most(lambda: onnxruntime.infer_mapped(graph, 1)),
    "looked at": most(lambda: compact(graph, place)),
    "int8": most(lambda: quantise(graph, place / "int8" / "model.onnx")),
    "served": most(lambda: opened(graph, 1)),
    "for a moment": most(lambda: sum(b"w" * graph.size)),
}))
"""


def test_judging_or_rounding_a_large_graph_keeps_weights_on_disk(tmp_path: Path) -> None:
    """The serving session reorders a copy of the weights. A new process has no freed memory to reuse."""
    command = [sys.executable, "-c", TAKEN, str(tmp_path)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=root)
    taken = json.loads(done.stdout.splitlines()[-1])
    size, served, moment = (taken.pop(name) for name in ("size", "served", "for a moment"))
    assert moment > 0.9 * size, "a copy is seen that is gone before another thread of that process could look"
    assert max(taken.values()) < 0.4 * size, taken
    assert served > 0.9 * size


def test_fp32_is_judged_from_its_file_and_again_if_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second build reuses the verified stages of the first."""
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("builder.engines.LARGE", 10_000)
    sessions: list[tuple[str, bool]] = []

    def noting(model: Path, session: Session) -> onnxruntime.InferenceSession:
        sessions.append((model.parent.name, session.entries == LEFT_IN_FILE))
        return open_session(model, session)

    monkeypatch.setattr("builder.engines.onnxruntime.decoding.open_session", noting)
    checkpoint = make_decoder_checkpoint(tmp_path / "checkpoint", "gpt2")
    options: dict[str, Any] = {"quality": 0.0, "perplexity": 1e9, "slots": 2, "max_length": 64}
    spec = {"model": str(checkpoint), "name": "m", "output": tmp_path / "repository", **options}
    small = build(make_spec(**spec, precision="int8", cache="int8"))
    assert {from_file for name, from_file in sessions if name.startswith("fused")} == {True}
    assert {from_file for name, from_file in sessions if not name.startswith("fused")} == {False}
    assert MAPPED in small.warnings
    sessions.clear()
    exact = build(make_spec(**spec))
    assert list(exact.kept) == ["verify"]
    assert {from_file for _, from_file in sessions} == {False}
    assert MAPPED not in exact.warnings
    assert exact.variants[1].latency_ms != small.variants[1].latency_ms, "timed as it is served"


@pytest.mark.parametrize(("free", "mapped"), [(1 << 62, False), (0, True)])
@pytest.mark.parametrize("model", ["decoder", "encoder"])
def test_large_graph_served_in_fp32_is_judged_once(
    model: str,
    free: int,
    mapped: bool,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Verify it as served if this machine has the memory; otherwise from its file, with a warning.

    The next build judges it again in the second case, because it may find the memory.
    """
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("builder.engines.LARGE", 10_000)
    monkeypatch.setattr("builder.engines.available_memory", lambda: free)
    if model == "encoder":
        spec = {"model": str(checkpoint("topics")), "max_length": 64}
    else:
        folder = make_decoder_checkpoint(tmp_path / "checkpoint", "gpt2")
        spec = {"model": str(folder), "slots": 2, "max_length": 64, "quality": 0.0}
    stages: list[str] = []
    asked = make_spec(**spec, name="m", output=tmp_path / "repository")
    report = build(asked, lambda name: _noting(name, stages))
    assert (MAPPED in report.warnings) == mapped
    assert not [name for name in stages if name.startswith("judge") and name.endswith("as served")]
    monkeypatch.setattr("builder.engines.available_memory", lambda: 1 << 62)
    again = build(asked)
    assert list(again.kept) == ["verify" if mapped else "select"]
    assert MAPPED not in again.warnings


@pytest.mark.parametrize("model", ["topics", "writes"])
def test_auto_refuses_fp32_that_cannot_be_timed_as_served(
    model: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.engines.LARGE", 10_000)
    monkeypatch.setattr("builder.engines.available_memory", lambda: 0)
    spec = make_spec(model=str(checkpoint(model)), max_length=64, precision="auto", output=tmp_path / "repository")
    with pytest.raises(BuilderError, match=r"auto times fp32 as it is served, which takes 0\.0 GB .* 0\.0 GB are free"):
        build(spec)


@contextmanager
def _noting(name: str, stages: list[str]) -> Iterator[None]:
    stages.append(name)
    yield
