"""A build process imports transformers without work that a build does not need."""

from __future__ import annotations

import subprocess
import sys

from transformers.utils import import_utils

from builder.checkpoints.libraries import MODELS, load_models, offered_models

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


def test_offered_models_equal_a_second_search() -> None:
    look = import_utils.define_import_structure
    assert offered_models() == look.__wrapped__(str(MODELS / "__init__.py"))
    load_models()
    assert import_utils.define_import_structure is look, "it is put back"
