"""Adapter of an encoder that blocks its engine while a gate is closed, and reports the requests that it holds.

Otherwise it is the emitted adapter, which is called emitted.py beside it. Its parameter `place` is a folder:
place/closed: the gate is closed; place/calls: the rows of each call of the engine; place/PROCESS.json: its requests.
"""

from __future__ import annotations

import importlib
import json
import os
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
        self.engine, self.front.infer = self.front.infer, self._infer
        self.queue.drain_interval_s = (
            LOOK_S  # between two checks of waiting requests; the default of a second would slow the tests
        )
        threading.Thread(target=self._tell, daemon=True).start()

    def _infer(self, feeds: dict[str, Any]) -> Any:
        with (self.place / "calls").open("a") as calls:
            calls.write(f"{len(feeds['input_ids'])}\n")
        while (self.place / "closed").exists():
            time.sleep(LOOK_S)
        return self.engine(feeds)

    def _tell(self) -> None:
        file = self.place / f"{os.getpid()}.json"
        while True:
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self._holds()))
            os.replace(unfinished, file)
            time.sleep(LOOK_S)

    def _holds(self) -> dict[str, int]:
        """Return the number of requests, and how many of them wait for a disconnected client."""
        with self.queue.changed:  # answers no request here: Triton forgets the clients of answered ones
            taken = [request for requests in self.queue.queued.values() for _, request in requests]
            left = sum(request.sender.is_cancelled() for request in taken)
            return {"requests": len(taken) + self.queue.answering, "left": left}
