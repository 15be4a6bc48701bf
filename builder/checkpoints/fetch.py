"""Files of a checkpoint: a local folder as it is, or a Hub id at the current commit of its revision."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from builder.checkpoints.card import CARD
from builder.common.errors import CheckpointError, RepositoryError, first_line
from builder.common.workplace import find_disk_full_error

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# No file that runs, except chat templates, which run in a sandbox, and nothing pickled.
FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model", "*.spm", CARD]


def fetch(model: str, revision: str | None, weights: bool) -> tuple[Path, str | None]:
    """Return the folder of `model` and, of a Hub id, the commit.

    Raises CheckpointError; RepositoryError for a full disk. Without `weights`, those of a Hub id are not downloaded.
    """
    root = Path(model).expanduser()
    if root.is_dir():
        return root, None
    if root.exists() or not HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model} is neither a folder nor a Hub id such as org/name")
    patterns = FILES if weights else [pattern for pattern in FILES if pattern != "*.safetensors"]
    try:
        local = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
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
