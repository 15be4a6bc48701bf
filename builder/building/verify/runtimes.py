"""Other versions of an engine: the one that serves must repeat the answers of this build's own, which were verified.

An environment is a folder with one version of an engine, installed once into the user's cache and put before this
build's own packages in a process of its own. There the recorded calls are repeated (replay.py). Knows graphs and
engines; knows no task and no architecture.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import numpy as np

from builder.building.verify.recording import Case
from builder.common.cache.folder import ENGINES, fetched_folder
from builder.common.errors import VerificationError
from builder.common.progress import Stage
from builder.engines import graph_engine
from builder.repository.report.record import EngineCheck

INSTALLING_S = 300
RUNNING_S = 1800
PYTHON = ".".join(map(str, sys.version_info[:2]))


class EngineUnavailable(Exception):
    """Raised if an engine cannot be installed here; its text is the reason."""


@dataclass(frozen=True)
class Replay:
    """Calls to repeat on the engine that will serve; they are recorded here first, if that engine is available.

    `in_process`: the emitted Python opens the graph itself, in the engine that its requirements pin.
    """

    engine: str
    in_process: bool
    cases: Callable[[], Sequence[Case]]


def environment(engine: str, version: str) -> Path:
    """Return the folder of `engine` in `version`, installed whole at its first use. Raises EngineUnavailable."""
    folder = fetched_folder(ENGINES, f"{engine}-{version}")
    if folder.is_dir():
        return folder
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise EngineUnavailable("offline")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary", ":all:", "--retries", "0", "--timeout", "10", "--target", f"{scratch}/whole"]
        try:
            done = subprocess.run(
                [*pip, f"{engine}=={version}"], capture_output=True, text=True, timeout=INSTALLING_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise EngineUnavailable("the package index did not answer in time") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise EngineUnavailable(f"pip could not install {engine} {version} ({(errors or ['offline?'])[-1]})")
        if not folder.is_dir():  # another process may have been first
            Path(scratch, "whole").rename(folder)
    return folder


def replayed(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> list[list[Any] | str]:
    """Return the answers to `jobs` on the engine in `folder`, or the reason why one has none.

    Raises VerificationError.
    """
    with tempfile.TemporaryDirectory() as scratch:
        calls, answers = Path(scratch, "calls"), Path(scratch, "answers")
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
        results: list[list[Any] | str] = pickle.loads(answers.read_bytes())
        return results


def difference(expected: Any, actual: Any, by_norm: bool = False, scale: float | None = None) -> float:
    """Return the largest difference as a share of the largest value expected, or by their norms.

    It is infinite if shapes or NaN differ. An output of a graph is measured by its values in all calls: the score of a
    row alone may be near zero.
    """
    if expected is None:
        return 0.0
    if isinstance(expected, Mapping):
        return max(difference(values, actual[name], by_norm) for name, values in expected.items())
    if isinstance(expected, list) and expected and isinstance(expected[0], Mapping):
        return max(
            difference(answer[name], other[name], by_norm, _size([one[name] for one in expected], by_norm))
            for answer, other in zip(expected, actual, strict=True)
            for name in answer
        )
    if isinstance(expected, list):
        return max((difference(a, b, by_norm) for a, b in zip(expected, actual, strict=True)), default=0.0)
    if expected.shape != actual.shape or not np.isfinite(actual).all():
        return float("inf")
    return _size([expected - actual], by_norm) / max(_size([expected], by_norm) if scale is None else scale, 1e-9)


def _size(arrays: Sequence[np.ndarray], by_norm: bool) -> float:
    """Return the largest value of `arrays`, or the root of their mean square."""
    values = np.concatenate([array.ravel() for array in arrays])
    if not values.size:
        return 0.0
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()) if by_norm else np.abs(values).max())


def compare(engine: str, version: str, where: str, cases: Callable[[], Sequence[Case]]) -> EngineCheck:
    """Repeat the calls of `cases` on `engine` in `version`; they are recorded here first, if it is available.

    Raises VerificationError if one is answered differently, or not at all.
    """
    check = EngineCheck(engine, version, where, False)
    if version == installed(engine):
        return replace(check, verified=True, python=PYTHON, note="this build's own version")
    try:
        folder = environment(engine, version)
    except EngineUnavailable as reason:
        return replace(check, note=f"not verified: {reason}")
    named, errors, count = cases(), [], 0
    for case, actual in zip(named, replayed(folder, [case.job for case in named]), strict=True):
        if isinstance(actual, str):
            raise VerificationError(
                f"{engine} {version}, which will serve ({where}), does not run {case.name}: {actual[:300]}. Nothing "
                "was published: build for another release (--triton) or in another --precision"
            )
        error = difference(list(case.answers), actual, case.by_norm)
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
    return replace(check, verified=True, calls=count, error=max(errors), python=PYTHON)


def verify_where_it_runs(triton: str, replay: Replay, stage: Stage) -> tuple[EngineCheck, ...]:
    """Check the build on the CPU engine of a Triton release, as a stage. Raises VerificationError."""
    engine = graph_engine(replay.engine)
    where = f"the {engine.facts.title} of Triton {triton}"
    if replay.in_process:
        where = f"what its requirements pin for Triton {triton}"
    version = engine.served_version(triton, replay.in_process)
    with stage(f"verify on {where}, {version}"):
        return (compare(str(engine.facts.package), version, where, replay.cases),)


def main() -> None:
    """Install versions of an engine into the cache and print their folders. Arguments: ENGINE VERSION ..."""
    for version in sys.argv[2:]:
        print(environment(sys.argv[1], version))


if __name__ == "__main__":
    main()
