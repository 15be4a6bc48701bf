"""Safetensors files of a checkpoint: select those that transformers reads, and refuse damaged ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from builder.checkpoints.untrusted import INDEX, indexed_files
from builder.common.errors import CheckpointError, first_line

WHOLE = "model.safetensors"
LFS_POINTER = b"version https://git-lfs"  # first bytes of a file whose content stayed on the server
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def weight_files(folder: Path, model: str) -> list[Path]:
    """Return the weight files of `folder` that transformers reads. Raises CheckpointError, which names `model`."""
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        read = {WHOLE} if (folder / WHOLE).is_file() else indexed_files(folder)
        missing = sorted(read - {file.name for file in weights})
        if missing:
            raise CheckpointError(f"{model} has no {missing[0]}, which {INDEX} names; download it again")
        return [file for file in weights if file.name in read] or weights  # others are the same in another format
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{model} has its weights only as a pickle ({pickles[0]}), which can run code when it is loaded; "
            "convert it once, where you trust it: model.save_pretrained(folder) writes model.safetensors"
        )
    raise CheckpointError(f"{model} has no *.safetensors in {folder}; expected the folder save_pretrained writes")


def refuse_damaged(files: Sequence[Path], model: str) -> None:
    """Raise CheckpointError for a file that is cut off or is not in the format of safetensors, by its name."""
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            with file.open("rb") as stream:
                is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
            instead = "it is a pointer of Git LFS; run git lfs pull" if is_pointer else "download it again"
            raise CheckpointError(
                f"{file.name} of {model} is damaged, or was not copied as a whole ({first_line(error)}): {instead}"
            ) from error
