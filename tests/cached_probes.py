"""Cache of probes: a tokenizer or chat template that was tried before gets the earlier answer.

A build tries each in a process with limits, and many tests build the same few checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from builder.common.limited import run_limited


@contextmanager
def cached_probes(folder: Path) -> Iterator[None]:
    """Patch `run_limited` everywhere in the package to read earlier answers from `folder`, shared by all workers.

    Probes that reach a limit or fail are not cached.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def cached(function: str, request: Any, seconds: int) -> Any:
        file = folder / f"{_key(function, request)}.json"
        if file.exists():
            return json.loads(file.read_text("utf-8"))
        answer = run_limited(function, request, seconds)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(answer), "utf-8")
        written.rename(file)  # atomic, because another worker may read it
        return answer

    with pytest.MonkeyPatch.context() as patch:
        for name, owner in list(sys.modules.items()):
            if name.startswith("builder.") and getattr(owner, "run_limited", None) is run_limited:
                patch.setattr(owner, "run_limited", cached)
        yield


def _key(function: str, request: dict[str, Any]) -> str:
    """Return a hash of a request and of the files that it names."""
    files = [Path(path) for path in (request.get("file"), *request.get("beside", ())) if path]
    contents = [file.read_bytes() if file.is_file() else None for file in files]
    others = {name: value for name, value in request.items() if name not in ("file", "beside")}
    return hashlib.sha256(repr((function, others, contents)).encode()).hexdigest()
