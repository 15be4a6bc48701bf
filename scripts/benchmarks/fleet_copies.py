"""Thousands of copies of a built model under other names, whose answers tell which copy they come from.

Files are hard links; only files with the name and the labels are written anew. Each copy has two versions, so that it
can be rolled back, and the labels contain the version too.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from builder.building.pipeline import build
from builder.options import make_spec
from builder.repository.config.render import CONFIG, parse
from builder.repository.report.record import REPORT
from builder.repository.sharing.hosting import MODELS, hosted_model
from builder.repository.sharing.share import share
from builder.repository.versions import BESIDE, served_number
from builder.runtime.hosted import HOSTED, dump_hosted
from tests.tiny_encoders import make_checkpoint

LABELS = 3
TINY: dict[str, Any] = {"num_hidden_layers": 1}
MINILM: dict[str, Any] = {  # its shape; random weights
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
    "initializer_range": 0.05,
}
VERSIONS = (1, 2)


def build_one(folder: Path, shape: dict[str, Any]) -> Path:
    """Build a classifier of that shape with the product. Return its entry."""
    with tempfile.TemporaryDirectory() as scratch:
        labels = {index: f"label{index}" for index in range(LABELS)}
        checkpoint = make_checkpoint(Path(scratch) / "checkpoint", "bert", "text-classification", labels, **shape)
        spec = make_spec(
            model=str(checkpoint),
            name="one",
            output=folder,
            precision="int8",
            threads=1,
            quality=0.0,
            max_batch_size=16,
            max_length=128,
        )
        build(spec)
    return folder / "one"


def copy(entry: Path, repository: Path, name: str) -> None:
    """Copy the model of `entry` to `name`: version 2 is served, and version 1 is there for a rollback."""
    for number in VERSIONS:
        folder = repository / name / str(number)
        for source in sorted((entry / "1").rglob("*")):
            target = folder / source.relative_to(entry / "1")
            if source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif source.name not in (*BESIDE, "serving.json"):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(source, target)
        _write(entry, folder, name, number)
    for file in (CONFIG, REPORT):
        (repository / name / file).write_bytes((folder / file).read_bytes())


def host(entry: Path, repository: Path, front: str, names: Sequence[str]) -> None:
    """Add copies of `entry` under `names` to the shared front `front`."""
    models = repository / front / MODELS
    if not models.exists():
        copy(entry, repository, names[0])
        share(repository, front, names[:1])
    for name in names:
        if not (models / name).exists():
            copy(entry, models, name)
    hosted = {name: hosted_model(models / name, served_number(models / name) or 1) for name in names}
    (models / HOSTED).write_text(dump_hosted(hosted), "utf-8")
    share(repository, front, ())


def label(name: str, number: int, index: int) -> str:
    """Return the label of class `index` in version `number` of a copy."""
    return f"{name}/{number}/{index}"


def _write(entry: Path, folder: Path, name: str, number: int) -> None:
    labels = [label(name, number, index) for index in range(LABELS)]
    serving = json.loads((entry / "1" / "serving.json").read_text("utf-8"))
    serving["parameters"]["labels"] = labels
    (folder / "serving.json").write_text(json.dumps(serving), "utf-8")
    config = parse((entry / CONFIG).read_text("utf-8"), name)
    config.name = name
    del config.version_policy.specific.versions[:]
    config.version_policy.specific.versions.append(number)
    config.parameters["labels"].string_value = json.dumps(labels)
    (folder / CONFIG).write_text(text_format.MessageToString(config), "utf-8")
    report = json.loads((entry / REPORT).read_text("utf-8"))
    report |= {"name": name, "version": number, "files": {name: {}}}
    (folder / REPORT).write_text(json.dumps(report), "utf-8")
