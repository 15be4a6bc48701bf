"""Hugging Face checkpoints to verified Triton Inference Server model repositories.

from builder import build, make_spec
report = build(make_spec(model="sentence-transformers/all-MiniLM-L6-v2"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from builder.telemetry import switch_off

if TYPE_CHECKING:
    from builder.errors import BuilderError
    from builder.load.measure import load_test
    from builder.load.traffic import Level, Target
    from builder.pipeline import build
    from builder.serve.client import Client
    from builder.serve.triton import running
    from builder.spec import BuildSpec, load_specs, make_spec
    from builder.stores.pull import pull
    from builder.stores.push import push
    from builder.stores.store import open_store
    from builder.triton.check import check
    from builder.triton.signatures import Signer, sign, unsigned

switch_off()  # before any library is imported: they read it as they are loaded

_HOMES = {
    "BuildSpec": "builder.spec",
    "BuilderError": "builder.errors",
    "Client": "builder.serve.client",
    "Level": "builder.load.traffic",
    "Signer": "builder.triton.signatures",
    "Target": "builder.load.traffic",
    "build": "builder.pipeline",
    "check": "builder.triton.check",
    "load_specs": "builder.spec",
    "load_test": "builder.load.measure",
    "make_spec": "builder.spec",
    "open_store": "builder.stores.store",
    "pull": "builder.stores.pull",
    "push": "builder.stores.push",
    "running": "builder.serve.triton",
    "sign": "builder.triton.signatures",
    "unsigned": "builder.triton.signatures",
}

__all__ = [
    "BuildSpec",
    "BuilderError",
    "Client",
    "Level",
    "Signer",
    "Target",
    "build",
    "check",
    "load_specs",
    "load_test",
    "make_spec",
    "open_store",
    "pull",
    "push",
    "running",
    "sign",
    "unsigned",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `build-repo query` need not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'builder' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
