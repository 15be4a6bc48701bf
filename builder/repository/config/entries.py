"""Entries of a repository: models, each with a configuration and files. Reads and writes no file.

Every entry is laid out as version 1; `RepositoryEntry.at` makes another version of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from builder.engines.placement import Accelerator, InstanceGroup, Shapes
from builder.options import Serving
from builder.runtime.fields import Field


@dataclass(frozen=True)
class WarmUp:
    """One warm-up request of the engine: a row of real tokens, or of zeros, repeated `batch_size` times."""

    name: str
    batch_size: int
    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """Values that templates/config.pbtxt.j2 needs, all of them.

    `queue_size`, `queue_timeout_us`: the limits that the dynamic batcher keeps, 0 where it keeps none. `label_files`:
    for an output the file of the version folder that names its classes, a line each.
    """

    name: str
    backend: str
    max_batch_size: int
    inputs: Sequence[Field]
    outputs: Sequence[Field]
    groups: Sequence[InstanceGroup]
    serving: Serving
    dynamic_batching: bool
    max_queue_delay_us: int = 0
    queue_size: int = 0
    queue_timeout_us: int = 0
    default_model_filename: str = ""
    platform: str = ""
    rate_limited: bool = False
    response_cache: bool = False
    graph_level: int = 0
    accelerators: Sequence[Accelerator] = ()
    cuda_graphs: Sequence[Shapes] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    warm_ups: Sequence[WarmUp] = ()
    decoupled: bool = False
    label_files: Mapping[str, str] = field(default_factory=dict)
    version: int = 1


@dataclass(frozen=True)
class RepositoryEntry:
    """One model of the repository: its configuration and its files, as bytes or as a file to copy."""

    name: str
    config: Config
    files: Mapping[str, bytes | Path]

    def at(self, version: int) -> RepositoryEntry:
        """Return the same entry as version `version`."""
        files = {numbered(path, version): content for path, content in self.files.items()}
        for path in (f"{version}/model.json", f"{version}/model.yaml"):  # of vLLM and TensorRT-LLM
            arguments = files.get(path)
            if isinstance(arguments, bytes):  # they contain the path of the checkpoint in the repository
                files[path] = arguments.replace(f"/{self.name}/1/".encode(), f"/{self.name}/{version}/".encode())
        return replace(self, config=replace(self.config, version=version), files=files)


def numbered(path: str, version: int, of: int = 1) -> str:
    """Return the path in version `version` of a file of version `of`."""
    return re.sub(rf"^(warmup/)?{of}/", rf"\g<1>{version}/", path)
