"""The hash of an export depends on exactly the code that it reaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from builder.common.replaced import replaced
from builder.graphs.export import cached_attention
from builder.graphs.export.architectures.t5 import REPLACED
from tests import cached_exports, code_hash

FILES = {
    "builder/graph.py": """
from __future__ import annotations
from typing import TYPE_CHECKING
from builder import sizes
from builder.parts.layers import scale as scaled
from builder.parts.tables import MOST, TABLE, of_the_machine
if TYPE_CHECKING:
    from builder.other import Anything

WIDTH = 3

class Graph:
    def forward(self, x: Anything) -> int:
        return scaled(x) * WIDTH + sizes.LEAST + TABLE["w"] + of_the_machine() + MOST

def unused():
    return 1
""",
    "builder/sizes.py": "LEAST = 5\n",
    "builder/other.py": "class Anything: ...\n",
    "builder/parts/__init__.py": "",
    "builder/parts/tables.py": """
TABLE = {"w": 1}
TABLE["v"] = 3
TABLE.update(u=5)
for size in range(7):
    TABLE[size] = size
try:
    from machine import of_the_machine
except ImportError:
    def of_the_machine():
        return 9
MOST = 11
MOST += 13
SEEN = 15
SEEN += 1
""",
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
        ("builder/parts/tables.py", '"w": 1', '"w": 2', True),
        ("builder/parts/tables.py", '"v"] = 3', '"v"] = 4', True),
        ("builder/parts/tables.py", "u=5", "u=6", True),
        ("builder/parts/tables.py", "range(7)", "range(8)", True),
        ("builder/parts/tables.py", "return 9", "return 10", True),
        ("builder/parts/tables.py", "MOST = 11", "MOST = 12", True),
        ("builder/parts/tables.py", "MOST += 13", "MOST += 14", True),
        ("builder/parts/tables.py", "SEEN = 15", "SEEN = 16", False),
    ],
)
def test_digest_changes_only_with_reachable_code(
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


def test_places_of_to_onnx_include_its_graph_rewrites() -> None:
    """Otherwise the hash of an export would cover too little."""
    reached = code_hash.places_of("builder.graphs.export.program", "to_onnx")
    assert ("builder.graphs.onnx.cleanup", "clean") in reached
    assert ("builder.graphs.export.exporter_shortcuts", "_promoted") in reached
    assert ("builder.graphs.export.caches", "ExportCache") in code_hash.places_of(
        "builder.graphs.export.decoder", "DecoderGraph"
    )
    assert ("builder.checkpoints.resolve", "resolve") not in reached


def _within(held: Callable[..., int]) -> Callable[..., int]:
    def wrapper(x: int) -> int:
        return wrapper(x - 1) if x > 1 else held(x)  # its closure contains itself, too

    return wrapper


def _by_default(x: int, held: Callable[..., int] = abs) -> int:
    return held(x)


def _by_keyword(x: int, *, held: Callable[..., int] = abs) -> int:
    return held(x)


def test_code_hash_covers_closures_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of a function does not name the functions in its closure and defaults."""
    monkeypatch.setattr(_by_default, "__defaults__", (code_hash._is_text,))
    monkeypatch.setattr(_by_keyword, "__kwdefaults__", {"held": code_hash._is_text})
    looked_up = _asked(monkeypatch)
    for function in (_within(code_hash._is_text), _within(_within(code_hash._is_text)), _by_default, _by_keyword):
        looked_up.clear()
        cached_exports._code(function)
        assert ("tests.code_hash", "_is_text") in looked_up


def test_code_hash_covers_the_replaced_bias_of_t5(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = _asked(monkeypatch)
    with replaced(REPLACED):
        cached_exports._code(T5Attention.compute_bias)
    assert looked_up >= {("builder.graphs.export.architectures.t5", name) for name in ("bias_by_row", "buckets")}


LAMBDAS: list[Callable[[int], object]] = [
    lambda x: x + 1,
    lambda x: x + 2,
    lambda x: x * 2,
    lambda x: _within(abs)(x),
    lambda x: _by_default(x),
]


def test_code_hash_tells_lambdas_apart() -> None:
    """Regression: a norm got the graph of another norm of its module, which differed in a lambda alone."""
    inside: list[Callable[[int], object]] = [lambda x: x + 1, lambda x: x + 2]
    assert len({cached_exports._code(one) for one in [*LAMBDAS, *inside]}) == len(LAMBDAS) + len(inside)


def test_code_hash_of_a_lambda_is_the_same_in_every_process() -> None:
    """Regression: the address of code inside a lambda was part of its hash, so that no later run used its graph."""
    source, module = "lambda x: sum(x for _ in range(2))", {"__name__": __name__}
    first, second = eval(source, module), eval(source, module)
    assert cached_exports._code(first) == cached_exports._code(second)


def test_export_key_has_no_address_of_a_function_in_a_dictionary() -> None:
    """Regression: Gemma 4 has functions in a dictionary, and every process exported it again."""
    keys = []
    for source in ("lambda x: x + 1", "lambda x: x + 1", "lambda x: x + 2"):
        module: Any = torch.nn.Identity()
        module.functions = {"default": eval(source, {"__name__": __name__})}
        keys.append(cached_exports._key(module, ()))
    assert keys[0] == keys[1] != keys[2]


def test_export_key_covers_a_function_that_a_test_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a later run got LongT5's graph as exported while the check that refuses it was replaced."""
    first = cached_exports._key(torch.nn.Identity(), ())
    with monkeypatch.context() as patch:
        patch.setattr(cached_attention, "statically_known_true", lambda condition: False)
        assert cached_exports._key(torch.nn.Identity(), ()) != first
    assert cached_exports._key(torch.nn.Identity(), ()) == first


def _asked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, ...]]:
    """Return the definitions that a hash covers."""
    looked_up: set[tuple[str, ...]] = set()

    def digest_of(module: str, *names: str) -> str:
        looked_up.add((module, *names))
        return ""

    monkeypatch.setattr(cached_exports, "digest_of", digest_of)
    return looked_up
