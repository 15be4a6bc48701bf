"""Load drafts that read hidden states, each for one target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.drafts import ASSISTANT, MTP, assistant, checked_folder, draft_format, eagle3, mtp
from builder.checkpoints.drafts.layers import DraftLayers
from builder.checkpoints.fetch import read_card, refuse_damaged, source_name, weight_files
from builder.common.hashing import digest_of
from builder.options import Source


@dataclass(frozen=True)
class HiddenStatesDraft:
    """Draft for one target, in fp32. `checkpoint`: its own files, with the tokenizer and the task of its target."""

    checkpoint: Checkpoint
    layers: DraftLayers


def load_draft(source: Source, of_target: Source, target: Checkpoint) -> HiddenStatesDraft | None:
    """Load a draft for `target`, which `of_target` names; None if the source is a decoder.

    Raises CheckpointError if the two do not belong together.
    """
    name = draft_format(source, of_target)
    if name is None:
        return None
    if name == MTP:
        layers = mtp.load(target.folder, target.weights, source.model, target.model)
        return HiddenStatesDraft(replace(target, config=layers.backbone.config, model=layers.backbone), layers.eval())
    folder, revision = checked_folder(source, weights=True)
    files = weight_files(folder, source.model)
    refuse_damaged(files, source.model)
    if name == ASSISTANT:
        layers = assistant.load(folder, source.model, target.model)
    else:
        layers = eagle3.load(folder, files, source.model, target.model)
    checkpoint = replace(
        target,
        source=source_name(source.model, revision),
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


def describe_draft(source: Source, of_target: Source, target: PreTrainedModel) -> DraftLayers | None:
    """Return the layers of a draft on the meta device, where they have no weights; None if the source is a decoder.

    Raises CheckpointError.
    """
    name = draft_format(source, of_target)
    if name is None:
        return None
    with torch.device("meta"):
        if name == MTP:
            return mtp.describe(target)
        module = assistant if name == ASSISTANT else eagle3
        return module.describe(checked_folder(source, weights=False)[0], source.model, target)
