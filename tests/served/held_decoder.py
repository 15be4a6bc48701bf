"""Adapter of a decoder that sends one response and then blocks while a gate is closed; it records each request.

It never asks Triton whether a client is gone: Triton 24.10 may end with boost's lock_exception if a process is killed
while it waits for that answer (4 of 29 that asked all the time). Otherwise it is the emitted adapter, which is called
emitted.py beside it. Its parameter `place` is a folder:
place/closed: the gate is closed; place/taken: a line for each request.
"""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

Emitted: Any = importlib.import_module(".emitted", __package__).TritonPythonModel


class TritonPythonModel(Emitted):  # type: ignore[misc]  # of no module of this project
    def initialize(self, args: dict[str, str]) -> None:
        self.place, self.sent_one = Path(json.loads(args["model_config"])["parameters"]["place"]["string_value"]), False
        super().initialize(args)

    def _submit(self, request: Any, sender: Any) -> None:
        super()._submit(request, sender)
        with (self.place / "taken").open("a") as taken:
            taken.write(f"{request.request_id()}\n")

    def _is_cancelled(self, sender: Any) -> bool:
        return False

    def _respond(self, sender: Any, answer: Any, last: bool) -> None:
        while self.sent_one and (self.place / "closed").exists():
            time.sleep(0.02)
        super()._respond(sender, answer, last)
        self.sent_one = True
