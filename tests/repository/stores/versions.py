"""Versions of a small model, published without a build: stores carry only files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from builder.options import Serving
from builder.repository.config.entries import Config, RepositoryEntry
from builder.repository.publish import publish
from builder.repository.report.record import file_hashes
from builder.repository.verdict import Unverified
from tests.reports import REPORT

MODEL = b"class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def publish_version(repository: Path, front: bytes, weights: bytes) -> None:
    """Publish the next version of a front with its engine; model.py contains the comment `front`."""
    publish(repository, outcome(front, weights))


def outcome(front: bytes, weights: bytes) -> Unverified:
    """Return the outcome of a build with these files, without its verification."""
    entries = []
    engine = {"1/model.py": MODEL, "1/weights": weights}
    for name, files in {"front": {"1/model.py": MODEL + b"# " + front}, "front_model": engine}.items():
        config = Config(name, "python", 1, [], [], [], Serving(), dynamic_batching=False)
        entries.append(RepositoryEntry(name, config, files))
    return Unverified(tuple(entries), replace(REPORT, files=file_hashes(entries)))


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of `folder`, by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
