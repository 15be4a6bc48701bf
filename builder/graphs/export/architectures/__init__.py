"""Oddities of architectures that do not follow transformers' attention interface, one file each.

The folder is the registry: `<model_type>.py` has `fused(model)`, a context manager in which every attention of
`model` emits the fused operator. An architecture without a file here needs none, or exports unfused.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel


def fused_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return the architecture's own way to fuse attention, if it has one."""
    name = model.config.model_type.replace("-", "_")
    if name not in {module.name for module in pkgutil.iter_modules(__path__)}:
        return nullcontext()
    context: AbstractContextManager[None] = importlib.import_module(f"{__name__}.{name}").fused(model)
    return context


@contextmanager
def replaced_method(module_class: type[torch.nn.Module], method: Callable[..., Any], name: str) -> Iterator[None]:
    """Run with another method `name` of `module_class`."""
    original = getattr(module_class, name)
    setattr(module_class, name, method)
    try:
        yield
    finally:
        setattr(module_class, name, original)


def replaced_forward(module_class: type[torch.nn.Module], forward: Callable[..., Any]) -> AbstractContextManager[None]:
    """Run with another `forward` of `module_class`."""
    return replaced_method(module_class, forward, "forward")
