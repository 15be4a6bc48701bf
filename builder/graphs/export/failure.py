"""Find the cause of a failed export, in one line: PyTorch hides it under general advice, or in a chain of errors.

Knows exceptions and where they came from; knows no architecture.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import FrameType

import torch

from builder.common.errors import BuilderError

OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.:]+)'")
COMPLEX = "complex-valued input"  # the message of torch's exporter, if this is why an operator is missing
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def reason(error: BaseException) -> str:
    """Return the first error, and its place in the model's own code. A BuilderError is returned as it is."""
    place = ""
    while True:
        if isinstance(error, BuilderError):
            return str(error)
        place = _place(error) or place
        if error.__cause__ is None:
            break
        error = error.__cause__
    kind, where = type(error).__name__, f" ({place})" if place else ""
    if kind.startswith("GuardOnDataDependent"):
        return f"its code branches on the values of a text, and a graph has one branch{where}"
    lines = [line.strip() for line in COLOUR.sub("", str(error)).splitlines() if line.strip()] or [""]
    missing = OPERATOR.search(lines[0])
    if missing and COMPLEX in str(error):
        return f"its code computes with complex numbers ({missing[1]}), and ONNX's operators take real ones{where}"
    if missing:
        return f"ONNX has no operator for {missing[1]}{where}"
    if not place:
        return f"{kind}: {lines[0][:200]}"
    return f"its code fails{': ' * bool(lines[0])}{lines[0][:200]} ({kind} in {place})"


def _place(error: BaseException) -> str:
    """Return the innermost line of transformers' code of a model, and the module that ran it."""
    found: list[tuple[FrameType, int]] = []
    trace = error.__traceback__
    while trace is not None:
        if "/transformers/models/" in trace.tb_frame.f_code.co_filename:
            found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    if not found:
        return ""
    frame, line = found[-1]
    owners = (frame.f_locals.get("self") for frame, _ in reversed(found))
    owner = next((owner for owner in owners if isinstance(owner, torch.nn.Module)), None)
    module = f"{type(owner).__name__}, " if owner is not None else ""
    return f"{module}{Path(frame.f_code.co_filename).name}, line {line}"
