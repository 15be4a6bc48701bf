"""Import transformers.models without a second search through all of its files.

`import transformers` reads every module of every model for the names that it offers. `transformers.models` reads them
all again when it is imported, because the result is cached for 128 folders and there are three times as many. Here it
gets the result of the first search.

Source: transformers 5, src/transformers/__init__.py and `create_import_structure_from_path` of utils/import_utils.py
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import transformers
from transformers.utils import import_utils

MODELS = Path(transformers.__file__).parent / "models"

Offered = dict[frozenset[str], dict[str, set[str]]]  # by required packages: the names of each module


def load_models() -> None:
    """Import `transformers.models`."""
    found, look = offered(), import_utils.define_import_structure
    import_utils.define_import_structure = lambda folder, prefix=None: found
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = look


def offered() -> Offered:
    """Return the index that `transformers.models` needs, derived from that of `transformers` without reading a file."""
    everything = import_utils.define_import_structure(MODELS, prefix=MODELS.name)  # cached by `import transformers`
    return {needed: _within(modules) for needed, modules in everything.items()}


def _within(modules: Mapping[str, set[str]]) -> dict[str, set[str]]:
    start = f"{MODELS.name}."
    return {name.removeprefix(start): names for name, names in modules.items() if name.startswith(start)}
