"""A tiny privacy filter from a fixed seed: an encoder with sinks, a band, sparse experts and tags of BIOES."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_encoders import make_checkpoint

TAGS = ("O", *(f"{place}-{name}" for name in ("private_person", "secret") for place in "BIES"))
BAND = 8  # tokens that a token sees on each side


def make_privacy_filter(folder: Path, **options: Any) -> Path:
    """Save a privacy filter whose sinks and biases count, into `folder`."""
    tags = dict(enumerate(TAGS))
    make_checkpoint(folder, "openai_privacy_filter", "token-classification", tags, **options)
    torch.manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    changed = {
        name: torch.randn(values.shape) if name.endswith(("sinks", "bias")) else values
        for name, values in weights.items()
    }
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder
