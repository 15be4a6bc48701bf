"""Documents as YAML that can be read: keys in order, texts of several lines as such, nothing by reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

HEAD = "# Written by build-repo deploy.\n"


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def text(document: Mapping[str, Any]) -> str:
    """`document` with a line that says where it is from."""
    return HEAD + yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=1000)
