"""Emitted code in the Pythons of Triton's containers, with the packages that its requirements pin there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.common.cache.folder import ENGINES, fetched_folder
from builder.common.releases import RELEASES

PYTHONS = {version: fetched_folder(ENGINES, f"python-{version}") / "bin" / "python" for version in ("3.10", "3.12")}


def _answers(python: Path, repository: Path) -> dict[str, Any]:
    program = Path(__file__).with_name("emitted_answers.py")
    done = subprocess.run([python, program, repository], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(
            version,
            marks=pytest.mark.skipif(  # before the repository is built
                not python.exists(),
                reason=f"scripts/pythons makes an environment of Python {version}",
            ),
        )
        for version, python in PYTHONS.items()
    ],
)
def test_emitted_code_answers_alike_in_the_pythons_of_the_containers(version: str, repository: Path) -> None:
    """Cover a decode loop, one with beam search, an encoder-decoder and an encoder."""
    here, there = _answers(Path(sys.executable), repository), _answers(PYTHONS[version], repository)
    assert there["python"].startswith(f"{version}.")
    assert there["onnxruntime"] in {r.in_process for r in RELEASES.values() if r.python == version}
    assert there["texts"] == here["texts"]
    assert all(here["texts"].values())
    np.testing.assert_allclose(there["scores"], here["scores"], rtol=1e-3, atol=1e-5)
