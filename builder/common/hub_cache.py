"""Find the snapshot in a repository's folder of the Hub's cache, such as models--ORG--NAME."""

from __future__ import annotations

from pathlib import Path

from builder.common.errors import SpecError

KINDS = ("models--", "datasets--")  # that names of such folders begin with


def current_snapshot(folder: Path) -> Path:
    """Return the snapshot that `refs/main` of such a folder names, or else its only one; any other folder as it is.

    Raises SpecError if neither is there.
    """
    main, snapshots = folder / "refs" / "main", folder / "snapshots"
    if not snapshots.is_dir() or not (main.is_file() or folder.resolve().name.startswith(KINDS)):
        return folder
    found = sorted(path for path in snapshots.iterdir() if path.is_dir())
    if main.is_file():
        commit = main.read_text("utf-8").strip()
        lacking, chosen = f"not {commit}, which refs/main names", [path for path in found if path.name == commit]
    else:
        lacking, chosen = "no refs/main to choose one", found
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(path.name for path in found) or "none"
    raise SpecError(
        f"{folder} is of the Hub's cache and has {lacking}; give a snapshot's folder ({snapshots}: {names})"
    )
