"""Facts about the inference engines, read from builder/engines/*/engine.toml: each engine's folder has one.

They are data, so that the options can list the engines and a check can read them without importing an engine.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from builder.common.distribution import PACKAGE


@dataclass(frozen=True)
class EngineFacts:
    """Facts about one engine.

    name: the value of --engine, and of `backend` in config.pbtxt; the folder's, with dashes.
    title: the name in messages and reports.
    model_file: the file that Triton's backend opens.
    package: the Python distribution whose version identifies the engine; None if none does.
    order: the place in lists; without --engine, the first engine that has a precision runs it.
    targets: values of --target that --engine NAME goes with; none if it cannot be requested.
    is_installed: builds on a CPU use the package, and record its version where it is installed.
    extra: the extra of the project that brings the package; None if the project itself does.
    compiles_where_served: the model's file is compiled later, on the GPU that serves it.
    runs_checkpoint: the engine runs a checkpoint as it is, so that nothing is exported.
    container: the end of the tag of the image of Triton's that has the engine.
    compute_capabilities: by precision, or for `any`, the least that it needs of a GPU, and the source.

    As Triton's core knows it, in src/model_config_utils.cc:

    platforms: values of `platform` that imply the backend.
    detection_order: the place among the files by which Triton finds the backend of a model, and completes its
        configuration; None if it does neither.
    cpu_instances: instances on a CPU where the configuration does not say how many.
    opens_folders: the model's file may be a folder, with a file of the same name in it.
    """

    name: str
    title: str
    model_file: str
    package: str | None = None
    order: int = 99
    targets: tuple[str, ...] = ()
    is_installed: bool = False
    extra: str | None = None
    compiles_where_served: bool = False
    runs_checkpoint: bool = False
    container: str = "py3"
    compute_capabilities: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    platforms: tuple[str, ...] = ()
    detection_order: int | None = None
    cpu_instances: int = 1
    opens_folders: bool = False

    def is_missing(self) -> bool:
        """Return True if an extra brings the package that builds use, and it is not installed."""
        if not (self.is_installed and self.extra and self.package):
            return False
        return importlib.util.find_spec(self.package) is None


def _facts(file: Path) -> EngineFacts:
    table = tomllib.loads(file.read_text("utf-8"))
    lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
    try:
        return EngineFacts(file.parent.name.replace("_", "-"), **{**table, **lists})
    except TypeError as error:
        raise TypeError(f"{file} does not have the fields of EngineFacts: {error}") from None


_FACTS = sorted(map(_facts, (PACKAGE / "engines").glob("*/engine.toml")), key=lambda facts: (facts.order, facts.name))
ENGINES: Mapping[str, EngineFacts] = {facts.name: facts for facts in _FACTS}
# Engines whose models Triton's core finds by their file, in its order.
DETECTED = sorted(
    (facts for facts in _FACTS if facts.detection_order is not None), key=lambda facts: facts.detection_order or 0
)
