"""Import transformers' losses without SciPy, which only the matching of boxes in object detection's training needs.

`transformers.modeling_utils` imports the losses of all heads, and these SciPy's optimisers: 0.3 seconds of every build.

Source: transformers 5, src/transformers/loss/loss_for_object_detection.py
"""

from __future__ import annotations

import importlib

from transformers import utils


def load_losses() -> None:
    """Import `transformers.loss.loss_utils`, in a process that trains nothing."""
    installed = utils.is_scipy_available
    utils.is_scipy_available = lambda: False
    try:
        importlib.import_module("transformers.loss.loss_utils")
    finally:
        utils.is_scipy_available = installed
