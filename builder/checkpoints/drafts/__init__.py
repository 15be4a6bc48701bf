"""Drafts that read hidden states of the model that they draft for: layers of their own, which are no model alone.

This module recognises them, without torch; loading.py loads them. A module for each format gives the same DraftLayers
(layers.py), so that graphs and loops know no format.
"""

from __future__ import annotations

from pathlib import Path

from builder.checkpoints.fetch import fetch
from builder.checkpoints.json_files import read_json
from builder.checkpoints.untrusted import refuse_contents, refuse_files
from builder.options import Source

ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"})
KIND, EAGLE3 = "speculators_model_type", "eagle3"


def reads_hidden_states(source: Source) -> bool:
    """Return True if the checkpoint is a draft of this kind. Reads its configuration alone. Raises CheckpointError.

    EAGLE-3's own checkpoints say that they are a Llama; only `draft_vocab_size` tells them from one.
    """
    document = read_json(checked_folder(source, weights=False)[0] / "config.json", default={})
    if ARCHITECTURES.intersection(document.get("architectures") or ()):
        return True
    return "draft_vocab_size" in document and document.get(KIND, EAGLE3) == EAGLE3


def checked_folder(source: Source, weights: bool) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint and, of a Hub id, the commit. Raises CheckpointError.

    Without `weights`, those of a Hub id are not downloaded.
    """
    folder, revision = fetch(source.model, source.revision, weights)
    refuse_files(folder, source.model)
    refuse_contents(folder, source.model)
    return folder, revision
