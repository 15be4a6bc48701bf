"""NVIDIA's load generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import WORK, check, report

OFFLINE = "HF_HUB_OFFLINE"  # with it, a folder is not accepted as a tokenizer; without it, the hub is not asked either
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != OFFLINE}


def profile(kind: str, model: str, *more: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "aiperf"), "profile", "-m", model, "--endpoint-type", kind]
        command += ["--url", WORK["gateway"], "--tokenizer", WORK["tokenizer"], "--ui", "none"]
        command += ["--artifact-dir", folder]
        command += ["--concurrency", "2", "--request-count", "8", "--synthetic-input-tokens-mean", "32", *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        assert done.returncode == 0, (done.stderr.strip().splitlines() or done.stdout.strip().splitlines())[-1]
        (figures,) = Path(folder).rglob("profile_export_aiperf.json")
        assert json.loads(figures.read_text())["request_count"]["avg"] == 8


@check("chat, streamed")
def _() -> None:
    profile("chat", "writes", "--streaming", "--output-tokens-mean", "8")


@check("completions")
def _() -> None:
    profile("completions", "writes", "--output-tokens-mean", "8")


@check("embeddings")
def _() -> None:
    profile("embeddings", "embeds")


report()
