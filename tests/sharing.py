"""Which worker runs which tests: what shares something expensive stays together.

pytest-xdist's own groups are a suffix of a test's id, which pytest 9.2 does not let it add; so groups are read off
the files: those whose tests take a fixture of the served repository, and those with a fixture for the whole module.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parent.parent
SERVED = re.compile(r"\b(repository|server|client): ")


class Sharing(LoadScopeScheduling):  # type: ignore[misc]  # where mypy does not read xdist
    """Tests of a group go to one worker, the largest group first; every other test is a group of its own."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.split("::")[0]) or nodeid


@functools.cache
def _group(path: str) -> str | None:
    text = (ROOT / path).read_text()
    if SERVED.search(text) and "def repository(" not in text:
        return "served"
    return path if 'scope="module"' in text or "small_repository: " in text else None
