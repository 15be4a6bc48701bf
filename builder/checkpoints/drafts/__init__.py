"""Drafts that read hidden states of the model that they draft for: layers of their own, which are no model alone.

This module recognises them, without torch; loading.py loads them. A module for each format gives the same DraftLayers
(layers.py), so that graphs and loops know no format.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from builder.checkpoints.fetch import WHOLE, fetch
from builder.checkpoints.json_files import read_json
from builder.checkpoints.untrusted import INDEX, refuse_contents, refuse_files
from builder.options import Source

ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"})
KIND, EAGLE3 = "speculators_model_type", "eagle3"
ASSISTANTS, ASSISTANT = frozenset({"gemma4_assistant", "gemma4_unified_assistant"}), "assistant"
MTP = "mtp"  # a layer for multi-token prediction, of the target's own checkpoint


def draft_format(draft: Source, target: Source) -> str | None:
    """Return the name of the module that knows the draft; None if it is a decoder. Raises CheckpointError.

    Reads configurations and names of weights alone. EAGLE-3's own checkpoints say that they are a Llama; only
    `draft_vocab_size` tells them from one.
    """
    if is_same(draft, target):
        return None if own_layer_of(checked_folder(target, weights=False)[0]) is None else MTP
    document = read_json(checked_folder(draft, weights=False)[0] / "config.json", default={})
    if ARCHITECTURES.intersection(document.get("architectures") or ()):
        return EAGLE3
    if document.get("model_type") in ASSISTANTS:
        return ASSISTANT
    return EAGLE3 if "draft_vocab_size" in document and document.get(KIND, EAGLE3) == EAGLE3 else None


def is_same(draft: Source, target: Source) -> bool:
    """Return True if both are one Hub id, or one folder."""
    folders = [Path(one.model).expanduser() for one in (draft, target)]
    if all(folder.is_dir() for folder in folders):
        return folders[0].samefile(folders[1])
    return draft.model.rstrip("/") == target.model.rstrip("/")


def own_layer_of(folder: Path) -> int | None:
    """Return the number of the layer for multi-token prediction that the checkpoint in `folder` has; None without one.

    It comes after the layers of the model, which its configuration counts.
    """
    document = read_json(folder / "config.json", default={})
    number: Any = document.get("num_hidden_layers")
    if not document.get("num_nextn_predict_layers") or not isinstance(number, int):
        return None
    return number if f"model.layers.{number}.eh_proj.weight" in _names(folder) else None


def checked_folder(source: Source, weights: bool) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint and, of a Hub id, the commit. Raises CheckpointError.

    Without `weights`, those of a Hub id are not downloaded.
    """
    folder, revision = fetch(source.model, source.revision, weights)
    refuse_files(folder, source.model)
    refuse_contents(folder, source.model)
    return folder, revision


def _names(folder: Path) -> Iterable[str]:
    """Return the names of the weights in `folder`, by their index or the head of their only file."""
    if (folder / WHOLE).is_file():
        with safe_open(folder / WHOLE, framework="np") as weights:
            return set(weights.keys())
    return set(read_json(folder / INDEX, default={}).get("weight_map") or ())
