"""Check links, file names and numbers of a checkpoint before a library reads it.

A library would follow a link out of the folder, open any file that an index names, or create as many layers as
config.json asks for before it looks at the weights.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builder.common.errors import CheckpointError

INDEX = "model.safetensors.index.json"
CONFIGURATIONS = ("config.json", "gliner_config.json", "encoder_config/config.json")
LABELS = ("num_labels", "id2label", "label2id")
MAX_VALUES = {  # by field of a configuration; far beyond any known checkpoint
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"), 10_000),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_hidden_groups"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_local_experts"), 100_000),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "intermediate_size", "d_ff", "head_dim"), 10**7),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "type_vocab_size"), 10**9),
    **dict.fromkeys(LABELS, 100_000),
    **{"num_rnn_layers": 100, "max_width": 1000, "max_len": 10**6},
}
TEXTS = (".json", ".jinja", ".txt", ".model", ".spm", ".metadata")
MAX_BYTES = {"tokenizer.json": 256 << 20}
MAX_BYTES_OF_TEXT = 64 << 20  # of other files that are read whole; the largest in known checkpoints has 20 MiB


def refuse_files(root: Path, model: str) -> None:
    """Check the files of the checkpoint `root`, before any is read. Raises CheckpointError, which names `model`."""
    for link, target in _links_out(root):
        raise CheckpointError(
            f"{model}: {link} is a link out of the checkpoint, to {target}; put a copy of the file in its place"
        )
    for path in _paths(root):
        name = path.relative_to(root)
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{model}: {name} is {_kind(path)}, which is not read; expected files and folders")
        limit, size = MAX_BYTES.get(path.name, MAX_BYTES_OF_TEXT), path.stat().st_size if path.is_file() else 0
        if path.suffix in TEXTS and size > limit:
            raise CheckpointError(
                f"{model}: {name} has {size >> 20} MiB, more than any checkpoint has ({limit >> 20} MiB)"
            )


def refuse_contents(folder: Path, model: str) -> None:
    """Check the index and the configurations in `folder`. Raises CheckpointError, which names `model`."""
    outside = next((name for name in indexed_files(folder) if Path(name).name != name), None)
    if outside is not None:
        raise CheckpointError(f"{model}: {INDEX} names {outside!r}; expected names of files beside it, without a path")
    for file in CONFIGURATIONS:
        for name, value in _numbers(read_object(folder / file)):
            if value > MAX_VALUES[name]:
                raise CheckpointError(
                    f"the {file} of {model} says {name} {value}, more than any checkpoint has ({MAX_VALUES[name]})"
                )


def _paths(root: Path) -> list[Path]:
    return sorted([*root.glob("*"), *root.glob("*/*")])


def _kind(path: Path) -> str:
    """Name a path that is neither a file nor a folder."""
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(path.stat().st_mode), "not a file")


def _links_out(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield links out of `root`. A snapshot of the Hub's cache may link to the blobs beside it."""
    resolved = root.resolve()
    is_snapshot = resolved.parent.name == "snapshots"
    allowed = [resolved, resolved.parent.parent / "blobs"] if is_snapshot else [resolved]
    for path in _paths(root):
        target = path.resolve() if path.is_symlink() else resolved
        if not any(target.is_relative_to(folder) for folder in allowed):
            yield str(path.relative_to(root)), target


def indexed_files(folder: Path) -> set[str]:
    """Return the files that the index of weights in several files names."""
    weights = read_object(folder / INDEX).get("weight_map", {})
    return {str(name) for name in weights.values()} if isinstance(weights, dict) else set()


def _numbers(document: Any) -> Iterator[tuple[str, float]]:
    """Yield the fields of MAX_VALUES in a configuration and in those nested in it."""
    for name, value in document.items():
        if name in LABELS and isinstance(value, dict | list):
            yield name, len(value)
        elif name in MAX_VALUES and isinstance(value, int | float):
            yield name, value
        elif isinstance(value, dict):
            yield from _numbers(value)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if the file cannot be read, which its later reader will report."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
