"""A repository and a store with an encoder and a decode loop, published without a build."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builder.engines.placement import InstanceGroup
from builder.options import Serving
from builder.repository import versions
from builder.repository.config.entries import Config, RepositoryEntry
from builder.repository.publish import publish
from builder.repository.report.record import MeasuredVariant, file_hashes
from builder.repository.stores.store import open_store
from builder.repository.stores.transfer import push
from builder.repository.verdict import Unverified
from builder.runtime.contract import Session, dump
from builder.runtime.fields import Field
from tests.reports import REPORT
from tests.servings import decoder_serving, encoder_serving

MODEL = b"class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
TEXT = Field("text_input", "TYPE_STRING")
OPTION = Field("temperature", "TYPE_FP32", optional=True)
WEIGHTS, CACHE = 1_000_000, 5_000_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Publish `minilm`, an engine of 2 instances with 3 threads, as version 2; `writes`, a loop of 4, as version 1."""
    monkeypatch.setattr(versions, "OVERLAP_S", 0.0)
    repository = tmp_path / "model_repository"
    for _ in range(2):
        _publish(repository, "minilm", dump(encoder_serving(engine="minilm_model")))
    _publish(repository, "writes", dump(decoder_serving(engine="writes_model", session=Session(threads=4))))
    return repository


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> str:
    """Push the same models to an object store."""
    url = f"file://{tmp_path / 'store'}"
    for name in ("minilm", "writes"):
        push(folder, name, open_store(url))
    return url


def _publish(repository: Path, name: str, serving: str) -> None:
    config = Config(name, "python", 8, [TEXT, OPTION], [TEXT], [], Serving(), dynamic_batching=True)
    threads = {"intra_op_thread_count": "3"}
    groups = [InstanceGroup(2, "KIND_CPU")]
    engine = replace(config, name=f"{name}_model", groups=groups, parameters=threads)
    files = {"1/serving.json": serving.encode(), "1/model.py": MODEL}
    entries = (RepositoryEntry(name, config, files), RepositoryEntry(engine.name, engine, {"1/model.py": MODEL}))
    report = replace(
        REPORT,
        name=name,
        chosen="fp32",
        variants=(MeasuredVariant("fp32", WEIGHTS, {}),),
        memory={"cache": CACHE, "weights": WEIGHTS},
        files=file_hashes(entries),
    )
    publish(repository, Unverified(entries, report))
