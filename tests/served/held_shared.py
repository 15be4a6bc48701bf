"""Adapter of a shared front that blocks its models while a gate is closed, and records the requests to each.

Requests that it took for one model are not answered until it has taken one for another. Otherwise it is the emitted
adapter, which is called emitted.py beside it. Its parameter `place` is a folder: place/closed: the gate is closed;
place/calls: a line with a model and its requests, for each time that it was asked.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import threading
import time
from pathlib import Path
from typing import Any

Emitted: Any = importlib.import_module(".emitted", __package__).TritonPythonModel
LOOK_S = 0.02


class TritonPythonModel(Emitted):  # type: ignore[misc]  # of no module of this project
    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        self.place = Path(json.loads(args["model_config"])["parameters"]["place"]["string_value"])
        self.open_emitted, self.host.opened = self.host.opened, self._open
        self.queue.drain_interval_s = LOOK_S
        self.seen: set[str] = set()

    def _open(self, folder: Path) -> Any:
        front = self.open_emitted(folder)

        def answer(requests: list[Any]) -> Any:
            with (self.place / "calls").open("a") as calls:
                calls.write(f"{folder.parent.name} {len(requests)}\n")
            while (self.place / "closed").exists() or self._alone(folder.parent.name):
                time.sleep(LOOK_S)
            return front.answer(requests)

        return dataclasses.replace(front, answer=answer)

    def _alone(self, name: str) -> bool:
        """Return True if this thread answers accepted requests, and all of them were for the model `name`."""
        if threading.current_thread() is not self.queue.thread:
            return False
        self.seen |= set(self.queue.queued)
        return self.seen <= {name}
