"""Load drafts that read hidden states, each for one target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.drafts import checked_folder, eagle3
from builder.checkpoints.drafts.layers import DraftLayers
from builder.checkpoints.fetch import read_card, refuse_damaged, weight_files
from builder.common.hashing import digest_of
from builder.options import Source


@dataclass(frozen=True)
class HiddenStatesDraft:
    """Draft for one target, in fp32. `checkpoint`: its own files, with the tokenizer and the task of its target."""

    checkpoint: Checkpoint
    layers: DraftLayers


def load_draft(source: Source, target: Checkpoint) -> HiddenStatesDraft:
    """Load a draft for `target`. Raises CheckpointError if the two do not belong together."""
    folder, revision = checked_folder(source, weights=True)
    files = weight_files(folder, source.model)
    refuse_damaged(files, source.model)
    layers = eagle3.load(folder, files, source.model, target.model)
    checkpoint = replace(
        target,
        source=source.model.rstrip("/") if revision else folder.resolve().name,
        revision=revision,
        folder=folder,
        weights=tuple(files),
        weights_sha256=digest_of(files),
        config=layers.backbone.config,
        card=read_card(folder),
        model=layers.backbone,
        grids=None,
    )
    return HiddenStatesDraft(checkpoint, layers.eval())


def describe_draft(source: Source, target: PreTrainedModel) -> DraftLayers:
    """Return the layers of a draft for `target` on the meta device, where they have no weights.

    Raises CheckpointError.
    """
    folder, _ = checked_folder(source, weights=False)
    with torch.device("meta"):
        return eagle3.describe(folder, source.model, target)
