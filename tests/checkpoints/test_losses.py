"""A build process imports transformers' losses without SciPy's optimisers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from builder.clusters.fleet.work import load_libraries
load_libraries()
from transformers import utils
from transformers.modeling_utils import LOSS_MAPPING
print("scipy" in sys.modules, "builder.building.families.decoder" in sys.modules)
print(utils.is_scipy_available(), LOSS_MAPPING["ForCausalLM"].__name__)
"""


def test_imports_skip_modules_of_training_and_decoders() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True", "ForCausalLMLoss"]
