"""Orchestrators. The folder is the registry: `kubernetes` is `kubernetes.py`, with `TARGET`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from builder.clusters.deploy.deployment import Deployment

HEADER = "# Written by build-repo deploy.\n"


@dataclass(frozen=True)
class Target:
    """Target of a deployment.

    `files`: the files of a deployment, by their paths in the output folder; raises SpecError if the target cannot
    write them. `steps`: the commands that a user runs with that folder, one per line.
    """

    files: Callable[[Deployment], Mapping[str, str]]
    steps: Callable[[Deployment, Path], Sequence[str]]


def names() -> list[str]:
    """Return the names of all targets."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_target(name: str) -> Target:
    """Return the target called `name`, which is one of names()."""
    target: Target = importlib.import_module(f"{__name__}.{name}").TARGET
    return target


class _Dumper(yaml.SafeDumper):
    """Dumper of readable YAML: multi-line texts as blocks, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def to_yaml(document: Mapping[str, Any]) -> str:
    """Return `document` as YAML, its keys in order, under a line that names the program that wrote it."""
    return HEADER + yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=1000)
