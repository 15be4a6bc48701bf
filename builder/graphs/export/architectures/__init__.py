"""Oddities of architectures that do not follow transformers' attention interface, one file each.

The folder is the registry: `<model_type>.py` has `REPLACED`, a class of transformers, the name of its method, and a
method with which every attention emits the fused operator; or several such triples. It may have `prepared`, a context
manager in which a model has the modules that those methods use. An architecture without a file here needs none, or
exports unfused.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from transformers import PreTrainedModel

from builder.common.replaced import replaced


@contextmanager
def fused_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run with the architecture's own way to fuse attention, if it has one."""
    name = model.config.model_type.replace("-", "_")
    if name not in {module.name for module in pkgutil.iter_modules(__path__)}:
        yield
        return
    module = importlib.import_module(f"{__name__}.{name}")
    found, prepared = module.REPLACED, getattr(module, "prepared", nullcontext)
    with replaced(*([found] if isinstance(found[1], str) else found)), prepared(model):
        yield
