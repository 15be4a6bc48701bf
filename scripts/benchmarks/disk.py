"""Builds whose temporary folder is on disks of rising size, from one that holds nothing to one that holds everything.

Each build must either publish, or leave the repository as it was and end with one line that says what to do. The disks
are tmpfs in a mount namespace of their own, which needs a user who may mount, such as root.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from builder.repository.versions import version_numbers
from tests.decoders import make_decoder_checkpoint
from tests.tiny_encoders import make_checkpoint

KILOBYTES = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 65536)
MOUNTED = 'mount -t tmpfs -o size=$1k tmpfs "$TMPDIR" && shift && exec "$@"'


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench disk")
    parser.add_argument("--kilobytes", default=",".join(map(str, KILOBYTES)), help=f"default {KILOBYTES}")
    sizes = [int(size) for size in parser.parse_args().kilobytes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        checkpoints = {
            "encoder": make_checkpoint(scratch / "encoder", "bert", "text-classification", {0: "sport", 1: "food"}),
            "decoder": make_decoder_checkpoint(scratch / "decoder", "llama"),
        }
        for name, checkpoint in checkpoints.items():
            published = [_build(scratch, name, checkpoint, size) for size in sizes]
            assert published[-1], f"{name} was not built on the largest disk either: give larger ones"


def _build(folder: Path, name: str, checkpoint: Path, kilobytes: int) -> bool:
    """Return True if a build on a disk of that size published; print the reason in a line if it did not."""
    disk, repository = folder / "disk", folder / "repository"
    disk.mkdir(exist_ok=True)
    before = version_numbers(repository / name)
    program = Path(sys.executable).with_name("build-repo")
    build = [str(program), str(checkpoint), "--name", name, "--output", str(repository), "--rebuild"]
    command = ["unshare", "--mount", "sh", "-c", MOUNTED, "sh", str(kilobytes), *build]
    environment = {**os.environ, "TMPDIR": str(disk), "BUILD_REPO_CACHE": "off"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    print(f"{name}, {kilobytes} kB: {'published' if done.returncode == 0 else last}", flush=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1), f"it ended with {done.returncode}: {done.stderr}"
    assert (version_numbers(repository / name) != before) == (done.returncode == 0)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["decoder", "disk", "encoder", *_has(repository)])
    return done.returncode == 0


def _has(repository: Path) -> list[str]:
    return [repository.name] if repository.exists() else []


if __name__ == "__main__":
    main()
