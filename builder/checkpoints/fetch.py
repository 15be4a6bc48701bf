"""Files of a checkpoint: fetch those of a Hub id, select the weights that transformers reads, read the model card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import httpx2
import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm
from safetensors import SafetensorError, safe_open

from builder.checkpoints.hub import UnansweredError, bound_requests, resolve_commit
from builder.checkpoints.untrusted import INDEX, indexed_files
from builder.common.errors import CheckpointError, RepositoryError, first_line
from builder.common.hub_cache import current_snapshot
from builder.common.progress import OnProgress, on_download
from builder.common.workplace import find_disk_full_error

CARD = "README.md"
MAX_CARD_BYTES = 1 << 20  # that are read
CARD_FIELDS = ("license", "license_link", "base_model", "datasets")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# No file that runs, except chat templates, which run in a sandbox, and nothing pickled.
FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model", "*.spm", "artifact.metadata", CARD]
WHOLE = "model.safetensors"
LFS_POINTER = b"version https://git-lfs"  # first bytes of a file whose content stayed on the server
BYTES = "huggingface_hub.snapshot_download"  # its bar that counts the bytes on disk
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def fetch(model: str, revision: str | None, weights: bool) -> tuple[Path, str | None]:
    """Return the folder of `model` and, of a Hub id, the commit.

    Without `weights`, those of a Hub id are not downloaded. Raises CheckpointError; SpecError for a folder of the Hub's
    cache that does not say which snapshot; RepositoryError for a full disk.
    """
    root = Path(model).expanduser()
    if root.is_dir():
        return current_snapshot(root), None
    if root.exists() or not HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model} is neither a folder nor a Hub id such as org/name")
    patterns = FILES if weights else [pattern for pattern in FILES if pattern != "*.safetensors"]
    bound_requests()
    try:
        commit = resolve_commit(model, revision)
        if isinstance(commit, UnansweredError):
            local = Path(_cached(model, commit.__cause__ or commit, revision=revision, allow_patterns=patterns))
        else:
            download = _download if weights else snapshot_download
            local = Path(download(model, revision=commit, allow_patterns=patterns))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{model} is gated: ask for access at {ENDPOINT}/{model}, and set HF_TOKEN to a token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{model} has no revision {revision} on the Hub: name a branch, a tag or a whole commit"
        ) from error
    except (httpx2.HTTPError, OSError, ValueError) as error:
        if find_disk_full_error(error) is not None:
            raise RepositoryError(
                f"{model} has no room in the cache of the Hub, {HF_HUB_CACHE} ({error}). Free some space there, or "
                "have it on another disk: set HF_HOME to a folder there"
            ) from error
        reason = first_line(error)
        raise CheckpointError(
            f"no folder {model} here, and the Hub did not give a model of that name ({reason}). "
            "Check the spelling, the network and HF_TOKEN"
        ) from error
    return local, local.name  # a snapshot's folder is named by its commit


def source_name(model: str, commit: str | None) -> str:
    """Return the name of a checkpoint in reports: its Hub id or, without a `commit`, that of the given folder."""
    return model.rstrip("/") if commit else Path(model).expanduser().resolve().name


def _download(model: str, **files: Any) -> str:
    """Return the folder of a snapshot, after downloading what is missing; report the bytes if someone listens.

    The Hub's own bars know the size of a file when its download begins, so all sizes are asked for before.
    """
    on_progress = on_download.get()
    if on_progress is None:
        return snapshot_download(model, **files)
    try:
        planned = snapshot_download(model, **files, tqdm_class=_reporting(lambda done, total: None, 0), dry_run=True)
    except DryRunError as unanswered:
        return _cached(model, unanswered.__cause__ or unanswered, **files)
    total = sum(file.file_size or 0 for file in planned if file.will_download)
    return snapshot_download(model, **files, tqdm_class=_reporting(on_progress, total))


def _cached(model: str, unanswered: BaseException, **files: Any) -> str:
    """Return the folder of a snapshot in the cache. Raises `unanswered`, why the Hub failed, if there is none."""
    try:
        return snapshot_download(model, **files, local_files_only=True)
    except IncompleteSnapshotError:  # names the files that are missing
        raise
    except LocalEntryNotFoundError:
        raise unanswered from None


def _reporting(on_progress: OnProgress, total: int) -> type[tqdm]:
    """Return a progress bar for the Hub's downloads that prints nothing and reports the bytes of all files."""
    lock = Lock()  # several files are downloaded at once

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            self.counts_bytes = name == BYTES
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self.counts_bytes:
                with lock:
                    self.n += n or 0
                    on_progress(self.n, total)

    return Bar


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


def read_card(folder: Path) -> dict[str, list[str]]:
    """Return the CARD_FIELDS that the card in `folder` has, each as its texts; nothing if there is no card."""
    try:
        with (folder / CARD).open("rb") as stream:
            text = stream.read(MAX_CARD_BYTES).decode("utf-8", errors="replace")
        head = text.split("\n---", 1)[0].removeprefix("---") if text.startswith("---") else ""
        metadata = yaml.safe_load(head)
    except (OSError, RecursionError, ValueError, yaml.YAMLError):  # the Hub shows an invalid card as it is
        return {}
    if not isinstance(metadata, dict):
        return {}
    return {name: texts for name in CARD_FIELDS if (texts := _texts(metadata.get(name)))}


def _texts(value: Any) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    return [text for text in entries if isinstance(text, str) and text and text.isprintable()]
