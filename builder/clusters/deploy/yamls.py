"""Documents as readable YAML: keys in order, multi-line texts as blocks, no aliases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

HEADER = "# Written by build-repo deploy.\n"


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def to_yaml(document: Mapping[str, Any]) -> str:
    """Return `document` as YAML under a line that names the program that wrote it."""
    return HEADER + yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=1000)
