"""Measurements of earlier searches, so that the next one over the same checkpoint need not repeat them.

One file per key, in the user's cache folder; the key covers all that a measurement depends on: the checkpoint, the
options, the samples, the versions, the processor and this package itself. Losing a file costs only the time to measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from builder.building.keys import code, key_of
from builder.common.cache.digests import write_atomically
from builder.common.cache.folder import cache_home
from builder.repository.report.record import MeasuredVariant


class Measurements:
    """Measured variants by name. Without a `path` they are not stored."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.variants: dict[str, MeasuredVariant] = {}
        if path is not None and path.is_file():
            with suppress(OSError, ValueError, TypeError):  # a damaged file counts as missing
                self.variants = {
                    name: MeasuredVariant(**measured) for name, measured in json.loads(path.read_text("utf-8")).items()
                }

    def recall(self, name: str) -> MeasuredVariant | None:
        return self.variants.get(name)

    def remember(self, measured: MeasuredVariant) -> None:
        self.variants[measured.name] = measured
        if self.path is None:
            return
        with suppress(OSError):  # a full or read-only disk
            document = {name: asdict(known) for name, known in self.variants.items()}
            write_atomically(self.path, json.dumps(document).encode())


def measurements_of(facts: Mapping[str, Any]) -> Measurements:
    """Return the stored measurements that depend on `facts` (JSON) and on the builder's code."""
    return Measurements(cache_home() / "measured" / f"{key_of({'facts': facts, 'code': code()})[:32]}.json")
