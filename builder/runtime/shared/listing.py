"""List the hosted models and their versions: hosted.json, read again when it is replaced."""

from __future__ import annotations

import os
from pathlib import Path

from ..fields import InputError
from ..hosted import HOSTED, Hosted, HostedModel

SHOWN = 10  # names in an error


class Listing:
    """Models of the repository `folder`. Raises ContractError if hosted.json is invalid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_of = self._file()
        self.models = Hosted(folder)

    def refresh(self) -> None:
        """Read hosted.json again if it was replaced. Raises ContractError; the models then stay as they were."""
        now = self._file()
        if now != self.read_of:
            self.read_of = now
            self.models = Hosted(self.folder)

    def get(self, name: str) -> HostedModel:
        """Return the model of that name. Raises InputError if there is none."""
        try:
            return self.models[name]
        except KeyError:
            pass
        known = sorted(self.models)
        shown = ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")
        raise InputError(f"no model {name!r} is hosted here; there are: {shown or 'none'}")

    def text(self) -> str:
        """Return hosted.json unchanged."""
        return (self.folder / HOSTED).read_text("utf-8")

    def _file(self) -> tuple[int, int]:
        status = os.stat(self.folder / HOSTED)
        return status.st_ino, status.st_mtime_ns
