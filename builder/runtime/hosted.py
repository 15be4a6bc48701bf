"""Define hosted.json, which lists the models that a shared front hosts. Only this module reads and writes it.

Standard library only, Python 3.10: the build imports this module, and a copy of it is emitted with a shared front.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contract import SCHEMA, ContractError
from .typed_json import document_of, read_as

HOSTED = "hosted.json"
RESHARE = "Share its models again: build-repo share"  # the remedy if hosted.json does not fit


@dataclass(frozen=True)
class HostedModel:
    """Facts about a model that a shared front has before loading it."""

    version: int  # the version that answers
    build: str  # identifies the build: another build with the same version number differs
    inputs: Mapping[str, bool]  # its tensors, and True for each that may be left out
    outputs: Mapping[str, Sequence[int]]  # its tensors, and their dimensions without that of the batch
    parameters: Mapping[str, str]  # of its config.pbtxt
    max_batch_size: int


def dump_hosted(entries: Mapping[str, Any]) -> str:
    """Return hosted.json, a line a model; `entries`: by name a HostedModel, or a value of `Hosted.entries`."""
    plain = {n: dataclasses.asdict(e) if isinstance(e, HostedModel) else e for n, e in entries.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(plain[name])}" for name in sorted(plain)]
    return f'{{"schema": {SCHEMA}, "models": {{\n' + ",\n".join(lines) + "\n}}\n"


class Hosted(Mapping[str, HostedModel]):
    """hosted.json of the repository `folder`: thousands of entries, each parsed on access.

    Raises ContractError if another version wrote it, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        entries = document_of(folder / HOSTED, SCHEMA, RESHARE).get("models")
        if not isinstance(entries, dict):
            raise ContractError(f"{folder / HOSTED} has no models. {RESHARE}")
        self.entries = entries

    def __getitem__(self, name: str) -> HostedModel:
        model: HostedModel = read_as(HostedModel, self.entries[name], f"{HOSTED}.{name}", RESHARE)
        return model

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
