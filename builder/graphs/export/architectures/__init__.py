"""Oddities of architectures that do not follow transformers' attention interface, one file each.

The folder is the registry: `<model_type>.py` has `REPLACED`, a class of transformers, the name of its method, and a
method with which every attention emits the fused operator; or several such triples. Or it has `REFUSED`, a property of
the architecture by which the fused attention over a cache cannot compute its decoder. Beside `REPLACED` it may have
  prepared              a context manager in which a model has the modules that those methods use
  layers                what each layer keeps of a text, where transformers' cache does not show it
  bias_heads            how many heads have a bias on positions of their own, 1 if all have the same
  full_attention_limit  the most tokens of a text in which each attends to all before it
The last three take the configuration. An architecture without a file here needs none, or exports unfused.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel

from builder.common.errors import ExportError
from builder.common.replaced import replaced
from builder.runtime.contract import LayerShape


@contextmanager
def fused_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run with the architecture's own way to fuse attention, if it has one."""
    module = _file_of(model)
    if module is None or not hasattr(module, "REPLACED"):
        yield
        return
    found, prepared = module.REPLACED, getattr(module, "prepared", nullcontext)
    with replaced(*([found] if isinstance(found[1], str) else found)), prepared(model):
        yield


def follows_interface(model: PreTrainedModel) -> bool:
    """Return True if the architecture needs no file here."""
    return _file_of(model) is None


def own_layers(model: PreTrainedModel) -> tuple[LayerShape, ...] | None:
    """Return what each layer keeps of a text, by the architecture's own file; None if transformers' cache shows it."""
    found = _by_configuration(model, "layers")
    return None if found is None else tuple(found)


def bias_heads(model: PreTrainedModel) -> int:
    """Return how many heads have a bias on positions of their own, 1 if all have the same, 0 for none."""
    heads: int = _by_configuration(model, "bias_heads") or 0
    return heads


def refuse_uncomputable(model: PreTrainedModel) -> None:
    """Raise ExportError if `model` is a decoder that the fused attention over a cache cannot compute."""
    why = getattr(_file_of(model), "REFUSED", None)
    if why is not None:
        raise ExportError(why)


def refuse_sparse_attention(model: PreTrainedModel, max_length: int) -> None:
    """Raise ExportError if tokens of a text of `max_length` tokens do not attend to all before them."""
    limit = _by_configuration(model, "full_attention_limit")
    if limit is not None and limit < max_length:
        raise ExportError(
            f"in texts of more than {limit} tokens it chooses the keys that each token sees, by their values; the "
            f"fused attention over a cache sees all: build it for shorter texts, with --max-length {limit} or less"
        )


def _by_configuration(model: PreTrainedModel, name: str) -> Any:
    """Call the function `name` of the architecture's file with the configuration; None if it has no such function."""
    found = getattr(_file_of(model), name, None)
    return None if found is None else found(model.config)


def _file_of(model: PreTrainedModel) -> ModuleType | None:
    name = model.config.model_type.replace("-", "_")
    if name not in {module.name for module in pkgutil.iter_modules(__path__)}:
        return None
    return importlib.import_module(f"{__name__}.{name}")
