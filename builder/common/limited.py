"""Runs a function on untrusted input in a process of its own, which ends at a limit of time or memory.

A tokenizer or a chat template of a checkpoint can loop for ever, fill memory or crash the library that reads it. The
build tries it here first, and loads it only if it stayed within its limits.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

WALL_CLOCK_LIMIT_S = 600.0  # of the wall clock, on a machine that is busy with other things
MEMORY_LIMIT = 2 << 30  # bytes beside those of its libraries; the largest known tokenizers take a quarter
EXIT_OUT_OF_MEMORY = 3  # exit status of a child in which Python found no memory; other libraries abort
ONE_THREAD = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class LimitReached(Exception):
    """Raised where the function did not end within its limits; the message continues "it ..."."""


def run_limited(function: str, request: Any, seconds: int) -> Any:
    """Return the answer of `function` ("module:name") to `request`; both are JSON.

    `seconds`: of processor time. Raises LimitReached, and RuntimeError where the function raises an error.
    """
    command = [sys.executable, "-P", "-m", __name__, function, str(seconds), str(MEMORY_LIMIT)]
    environment = {**os.environ, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    text = json.dumps(request).encode()
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, timeout=WALL_CLOCK_LIMIT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise LimitReached(f"did not end within {WALL_CLOCK_LIMIT_S:g} s") from None
    if done.returncode == 0:
        return json.loads(done.stdout)
    if done.returncode == -signal.SIGXCPU:
        raise LimitReached(f"takes more than {seconds} s of processor time")
    if done.returncode in (EXIT_OUT_OF_MEMORY, -signal.SIGABRT):
        raise LimitReached(f"takes more than {MEMORY_LIMIT / (1 << 30):g} GiB of memory")
    if done.returncode == -signal.SIGKILL:
        raise LimitReached("was ended by the system, which may have no memory left: free some and build again")
    if done.returncode < 0:
        raise LimitReached(f"crashed ({signal.Signals(-done.returncode).name})")
    raise RuntimeError((done.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1])


def _lower_limit(kind: int, most: int) -> None:
    """Lower a limit of this process; one that the user set lower stays."""
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(kind, (most, hard))


def _answer(function: str, seconds: int, memory: int) -> None:
    """Answer the request on standard input; the output of libraries goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_CPU, seconds)
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)
    libraries = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _lower_limit(resource.RLIMIT_AS, libraries + memory)
    try:
        json.dump(answer(json.load(sys.stdin)), out)
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)
    out.close()


if __name__ == "__main__":
    _answer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
