"""Hugging Face checkpoints to verified Triton Inference Server model repositories.

from builder import build, make_spec
report = build(make_spec(model="sentence-transformers/all-MiniLM-L6-v2"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from builder.common.telemetry import switch_off

if TYPE_CHECKING:
    from builder.building.pipeline import build
    from builder.common.errors import BuilderError
    from builder.options import BuildSpec, load_specs, make_spec
    from builder.repository.check import check
    from builder.repository.signatures import sign, unsigned
    from builder.repository.signing_keys import Signer
    from builder.repository.stores.store import open_store
    from builder.repository.stores.transfer import pull, push
    from builder.serving.client.client import Client
    from builder.serving.load.measure import load_test
    from builder.serving.load.traffic import Level, Target
    from builder.serving.server.triton import running

switch_off()  # before any library is imported: they read it as they are loaded

_HOMES = {
    "BuildSpec": "builder.options",
    "BuilderError": "builder.common.errors",
    "Client": "builder.serving.client.client",
    "Level": "builder.serving.load.traffic",
    "Signer": "builder.repository.signing_keys",
    "Target": "builder.serving.load.traffic",
    "build": "builder.building.pipeline",
    "check": "builder.repository.check",
    "load_specs": "builder.options",
    "load_test": "builder.serving.load.measure",
    "make_spec": "builder.options",
    "open_store": "builder.repository.stores.store",
    "pull": "builder.repository.stores.transfer",
    "push": "builder.repository.stores.transfer",
    "running": "builder.serving.server.triton",
    "sign": "builder.repository.signatures",
    "unsigned": "builder.repository.signatures",
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
