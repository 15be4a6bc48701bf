"""Pytest plugin that separates tests marked `alone`, which load all cores, from all others.

ALONE=without skips them; ALONE=only runs only them, and does not import files without one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PART = os.environ.get("ALONE")
MARK = "mark.alone"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip files without a test marked `alone` if only these run."""
    is_test = collection_path.is_file() and collection_path.suffix == ".py"
    return True if PART == "only" and is_test and MARK not in collection_path.read_text("utf-8") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this part."""
    if PART is None:
        return
    kept = [item for item in items if (item.get_closest_marker("alone") is not None) == (PART == "only")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
