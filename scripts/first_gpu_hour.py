"""`scripts/first-gpu-hour`: run what a machine with a GPU must tell first, in order of value, within an hour.

Each step runs in a process of its own, which is ended after its time, and its result is written as it ends to
FOLDER/STEP.json. A command that has a result is not run again, so that an hour that was interrupted goes on where it
stopped; delete a file to run its step again. With --dry-run each step runs on the stand-ins, without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from builder.common.files import write_atomically
from builder.engines.gpu import gpus

ROOT = Path(__file__).parent.parent
TAIL = 20_000  # characters of a step's output that are kept
GRACE_S = 30  # for a step that takes too long, to end what it started
PYTEST = (sys.executable, "-m", "pytest", "-n", "0", "-q", "-rA")
VERSIONS = (
    "import sys, torch, transformers, onnxruntime as o; "
    "print(sys.version, torch.__version__, transformers.__version__, o.__version__, o.get_available_providers())"
)
COMPOSE = ("docker", "compose", "--profile", "gpu")
CUDA = "tests/gpu/test_cuda.py"


@dataclass(frozen=True)
class Step:
    """A command for a machine with a GPU, and its `rehearsal` on the stand-ins. {folder}: that of the results."""

    name: str
    minutes: float
    command: Sequence[str]
    rehearsal: Sequence[str]


STEPS = (
    Step("card", 1, ("nvidia-smi", "-q"), (sys.executable, "-c", VERSIONS)),
    Step("versions", 1, (sys.executable, "-c", VERSIONS), (sys.executable, "-c", VERSIONS)),
    Step(
        "encoders",
        5,
        (*PYTEST, CUDA, "-k", "encoder_answers"),
        (*PYTEST, "tests/engines/test_stand_ins.py"),
    ),
    Step(
        "decoders-in-slots",
        8,
        (*PYTEST, CUDA, "-k", "decoder_text"),
        (*PYTEST, "tests/generation/test_cuda_executor.py", "-k", "device_cache_answers and llama"),
    ),
    Step(
        "decoders-in-blocks",
        5,
        (*PYTEST, CUDA, "-k", "cuda_blocks"),
        (*PYTEST, "tests/generation/test_cuda_blocks.py", "-k", "device_blocks_answer and mistral"),
    ),
    Step("memory", 2, (*PYTEST, "tests/gpu/test_memory.py"), (*PYTEST, "tests/serving/plan/test_gpu.py")),
    Step(
        "speeds",
        13,
        ("scripts/bench", "gpu", "--output", "{folder}/figures.json"),
        (*PYTEST, "tests/test_bench_gpu.py"),
    ),
    Step(
        "plans",
        12,
        (*PYTEST, "tests/gpu/test_tensorrt.py"),
        (*PYTEST, "tests/repository/test_profiles.py"),
    ),
    Step("triton", 4, (*PYTEST, CUDA, "-k", "triton_serves"), (*PYTEST, "tests/engines/test_stock.py")),
    Step(
        "compose",
        9,
        ("sh", "-ec", f"trap '{' '.join(COMPOSE)} down' EXIT TERM; {' '.join(COMPOSE)} up --build --detach --wait"),
        (*PYTEST, "tests/clusters/deploy/test_compose.py"),
    ),
)


@dataclass(frozen=True)
class Result:
    """`status`: passed, failed, timed out or missing (no such command); `output`: its end, stdout and stderr."""

    step: str
    status: str
    seconds: float
    command: Sequence[str]
    output: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps without a result; return 1 if one did not pass."""
    parser = argparse.ArgumentParser(prog="scripts/first-gpu-hour", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("first-gpu-hour"), help="where the results are written")
    parser.add_argument("--dry-run", action="store_true", help="run each step on the stand-ins, without a GPU")
    options = parser.parse_args(arguments)
    if not options.dry_run and not gpus():  # tests that need one would be skipped, and pass
        parser.exit(1, "no NVIDIA GPU here (nvidia-smi finds none): nothing was run; --dry-run rehearses every step\n")
    return run_steps(STEPS, options.folder, options.dry_run)


def run_steps(steps: Sequence[Step], folder: Path, dry_run: bool) -> int:
    """Run `steps` without a result in `folder`, and write theirs there; return 1 if one did not pass, now or before."""
    folder.mkdir(parents=True, exist_ok=True)
    statuses = []
    for step in steps:
        path = folder / f"{step.name}.json"
        command = [part.format(folder=folder.resolve()) for part in (step.rehearsal if dry_run else step.command)]
        written = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if written.get("command") != command:
            print(f"{step.name}: at most {step.minutes:g} minutes", flush=True)
            written = asdict(run_step(step, command))
            write_atomically(path, json.dumps(written, indent=1).encode())
        statuses.append(written["status"])
        print(f"{step.name}: {written['status']} after {written['seconds']:.0f} s, {path}", flush=True)
    return int(set(statuses) != {"passed"})


def run_step(step: Step, command: Sequence[str]) -> Result:
    """Run `command`; after the step's minutes interrupt it, and then end it, with all processes of its group.

    Its output is a file: a process that it leaves behind would keep a pipe open.
    """
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return Result(step.name, "missing", 0.0, command, str(error))
        try:
            status = "passed" if process.wait(timeout=60 * step.minutes) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S)
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Result(step.name, status, time.monotonic() - begin, command, text[-TAIL:])


if __name__ == "__main__":
    sys.exit(main())
