"""Silence transformers, torch and the Hub, for commands; import parts of transformers without needless work."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import import_utils
from transformers.utils import logging as transformers_logging

from builder.common.replaced import replaced

MODELS = Path(transformers.__file__).parent / "models"


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence transformers, torch and the Hub within the block, or in a function that it decorates.

    Errors still surface as exceptions. For commands: it silences the whole process, until it is left.
    """
    verbosity, disabled = transformers_logging.get_verbosity(), logging.root.manager.disable
    shown, shown_of_hub = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disable_progress_bars()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
            transformers_logging.set_verbosity(verbosity)
            if shown:
                transformers_logging.enable_progress_bar()
            if shown_of_hub:
                enable_progress_bars()


def load_losses() -> None:
    """Import `transformers.loss.loss_utils` without SciPy, in a process that trains nothing.

    `transformers.modeling_utils` imports the losses of all heads. Only object detection's training needs SciPy, for the
    matching of boxes: 0.3 seconds of every build.
    Source: transformers 5, src/transformers/loss/loss_for_object_detection.py
    """
    with replaced((transformers.utils, "is_scipy_available", lambda: False)):
        importlib.import_module("transformers.loss.loss_utils")


def load_models() -> None:
    """Import `transformers.models` without a second search through all of its files.

    `import transformers` reads every module of every model for the names that it offers. `transformers.models` would
    read them all again, because the result is cached for 128 folders and there are three times as many.
    Source: transformers 5, src/transformers/__init__.py, and utils/import_utils.py (create_import_structure_from_path)
    """
    found = offered_models()
    with replaced((import_utils, "define_import_structure", lambda folder, prefix=None: found)):
        importlib.import_module("transformers.models")


def offered_models() -> dict[frozenset[str], dict[str, set[str]]]:
    """Return by required packages the names of each module, from the first search of `import transformers`."""
    everything = import_utils.define_import_structure(MODELS, prefix=MODELS.name)
    start = f"{MODELS.name}."
    return {
        needed: {name.removeprefix(start): names for name, names in modules.items() if name.startswith(start)}
        for needed, modules in everything.items()
    }
