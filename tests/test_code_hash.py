"""What a kept export depends on: code that it names, however far away, and none of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import code_hash

FILES = {
    "builder/graph.py": """
from __future__ import annotations
from typing import TYPE_CHECKING
from builder import sizes
from builder.parts.layers import scale as scaled
if TYPE_CHECKING:
    from builder.other import Anything

WIDTH = 3

class Graph:
    def forward(self, x: Anything) -> int:
        return scaled(x) * WIDTH + sizes.LEAST

def unused():
    return 1
""",
    "builder/sizes.py": "LEAST = 5\n",
    "builder/other.py": "class Anything: ...\n",
    "builder/parts/__init__.py": "",
    "builder/parts/layers.py": """
from ..sizes import LEAST
def scale(x):
    return _doubled(x)
def _doubled(x):
    if x:
        return 2 * x
    return LEAST
def another(x):
    return x
""",
}


def _digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(code_hash, "ROOT", folder)
    code_hash._definitions.cache_clear()
    code_hash.digest_of.cache_clear()
    try:
        return code_hash.digest_of("builder.graph", "Graph")
    finally:
        code_hash._definitions.cache_clear()
        code_hash.digest_of.cache_clear()


@pytest.mark.parametrize(
    ("file", "before", "after", "other"),
    [
        ("builder/graph.py", "WIDTH = 3", "WIDTH = 4", True),
        ("builder/graph.py", "* WIDTH", "+ WIDTH", True),
        ("builder/parts/layers.py", "2 * x", "3 * x", True),
        ("builder/parts/layers.py", "if x:", "if not x:", True),
        ("builder/sizes.py", "LEAST = 5", "LEAST = 6", True),
        ("builder/graph.py", "return 1", "return 2", False),
        ("builder/graph.py", "x: Anything) -> int", "x: float) -> float", False),
        (
            "builder/graph.py",
            "        return scaled",
            '        """What it does."""  # and why\n        return scaled',
            False,
        ),
        ("builder/parts/layers.py", "def another(x):\n    return x", "", False),
        ("builder/other.py", "...", "pass", False),
    ],
)
def test_an_edit_counts_where_the_code_reaches_it(
    file: str, before: str, after: str, other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    first = _digest(tmp_path, monkeypatch)
    text = (tmp_path / file).read_text()
    assert before in text
    (tmp_path / file).write_text(text.replace(before, after))
    assert (_digest(tmp_path, monkeypatch) != first) is other


def test_what_is_traced_reaches_the_rewrites_after_it() -> None:
    """So that the hash of an export is not of too little."""
    reached = code_hash.places_of("builder.export.program", "to_onnx")
    assert ("builder.onnx.cleanup", "clean") in reached
    assert ("builder.export.once", "_promoted") in reached
    assert ("builder.export.cached_attention", "ExportCache") in code_hash.places_of(
        "builder.export.decoder", "DecoderGraph"
    )
    assert ("builder.checkpoint.resolve", "resolve") not in reached
