"""The process that a build runs in: how its threads wait, and how often it looks for garbage."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from builder.fleet.work import SELDOM, SPINS, seldom_collecting

LOADS = "import ctypes, sys; from builder.fleet.work import spin_briefly; spin_briefly(); ctypes.CDLL(sys.argv[1])"


@pytest.mark.parametrize(("stated", "expected"), [(None, SPINS), ("77", "77")])
def test_the_threads_of_torch_spin_briefly_or_as_the_user_says(stated: str | None, expected: str) -> None:
    """GNU OpenMP reads it as it is loaded, and says so."""
    packages = Path(torch.__file__).parent.parent
    library = next(file for folder in ("torch/lib", "torch.libs") for file in packages.glob(f"{folder}/libgomp*"))
    around = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    around |= {"OMP_DISPLAY_ENV": "verbose"} | ({} if stated is None else {"GOMP_SPINCOUNT": stated})
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(library)], env=around, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


def test_garbage_is_looked_for_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with seldom_collecting():
        assert gc.get_threshold() == SELDOM
    assert gc.get_threshold() == before
