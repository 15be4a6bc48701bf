"""Build the project's containers and run them in podman, on a stand-in of NVIDIA's image.

Prints one line for each step. The exit status is 1 where a step failed, and 3 where this machine lacks what containers
need: then it names the packages and installs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from builder.common.cache.folder import cache_home
from scripts.container_trial.base import PYTHONS, make_base, suite_of_machine
from scripts.container_trial.compose import compose
from scripts.container_trial.engine import Engine, TrialError, missing_packages
from scripts.container_trial.images import build_images
from scripts.container_trial.on_demand import on_demand
from scripts.container_trial.pod import pod
from scripts.container_trial.replacement import replace
from scripts.container_trial.repository import Repository, make_repository
from scripts.container_trial.serve import serve

STEPS: dict[str, Callable[[Engine, Repository, Path], str]] = {
    "serve": serve,
    "compose": compose,
    "pod": pod,
    "replace": replace,
    "on-demand": on_demand,
}
FAILED, NOT_HERE = 1, 3
Result = TypeVar("Result")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/containers", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; all, unless given")
    parser.add_argument("--suite", choices=PYTHONS, default=suite_of_machine(), help="of the base image")
    parser.add_argument("--folder", type=Path, default=cache_home() / "containers", help="where images are kept")
    parser.add_argument("--backends", type=Path, metavar="FOLDER", help="Triton's C++ backends for the base image")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.steps if name not in STEPS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(STEPS)}")
    lacking = _reasons_not_to_start()
    if lacking:
        parser.exit(NOT_HERE, "".join(f"scripts/containers: {reason}\n" for reason in lacking))
    engine, status = Engine(options.folder.resolve()), FAILED
    try:
        with contextlib.suppress(TrialError):  # its line is printed
            status = run_steps(engine, options.suite, options.backends, options.steps or list(STEPS))
    finally:
        try:
            report("clean", engine.clean)
        except TrialError:
            status = FAILED
    return status


def run_steps(engine: Engine, suite: str, backends: Path | None, steps: Sequence[str]) -> int:
    """Make the images and the model that every step needs, and run each of `steps`; return the exit status.

    Raises TrialError if there are no images or no model.
    """
    report("engine", engine.prepare)
    with tempfile.TemporaryDirectory(dir=engine.folder) as folder:
        base = report("base", partial(make_base, engine, suite, backends))
        report("images", partial(build_images, engine, base))
        repository = report("repository", partial(make_repository, Path(folder) / "repository"))
        failed = False
        for name in steps:
            scratch = Path(folder) / name
            scratch.mkdir()
            try:
                report(name, partial(STEPS[name], engine, repository, scratch))
            except TrialError:
                failed = True
    return FAILED if failed else 0


def report(name: str, step: Callable[[], Result]) -> Result:
    """Run a step and print its line: its result, or its error, which is raised again."""
    begin = time.monotonic()
    try:
        result = step()
    except TrialError as error:
        print(f"FAILED  {name} ({time.monotonic() - begin:.0f} s): {error}", flush=True)
        raise
    print(f"passed  {name} ({time.monotonic() - begin:.0f} s): {result}", flush=True)
    return result


def _reasons_not_to_start() -> list[str]:
    reasons = [] if os.geteuid() == 0 else ["containers need root here: run it as root"]
    packages = missing_packages()
    if packages:
        reasons.append(f"install what is missing: apt-get install --no-install-recommends {' '.join(packages)}")
    return reasons


if __name__ == "__main__":
    sys.exit(main())
