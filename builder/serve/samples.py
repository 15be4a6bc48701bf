"""Requests for a served model: the user's own, or the defaults of the model's task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builder.errors import SpecError
from builder.samples import load_samples, with_mask
from builder.serve.client import Client

FIXED = {"truncate": True, "max_tokens": 32, "ignore_eos": True}  # set where the model has these inputs


def samples_for(client: Client, file: Path | None) -> Sequence[Mapping[str, Any]]:
    """Return the requests in `file`, or those of the model's task. Raises SpecError if the model declares no task."""
    if file is not None:
        return load_samples(file, client.signature.inputs)
    from builder.tasks import find_task  # imports torch

    task = client.signature.parameters.get("task")
    if task is None:
        raise SpecError(f"{client.name} does not say its task; give inputs for it with --samples FILE")
    mask = client.signature.parameters.get("mask_token", "")
    inputs = {field.name for field in client.signature.inputs}
    fixed = {name: value for name, value in FIXED.items() if name in inputs}
    return [{**with_mask(sample, mask), **fixed} for sample in find_task(task).samples]
