"""A repository with two versions, for tests that switch servers from one to the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.repository import versions
from tests.repository.test_publish import _publish


def two_versions(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Publish versions 1 and 2, of which 2 is served."""
    monkeypatch.setattr(versions, "OVERLAP_S", 0)  # no server loads the versions
    _publish(repository, b"one")
    _publish(repository, b"two")
    return repository
