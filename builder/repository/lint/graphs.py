"""Graph of a version, as far as it can be read here. Knows engines; knows no rule."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from google.protobuf.message import DecodeError

from builder.engines import onnxruntime, openvino, stock, tensorrt
from builder.repository.lint.repository import ModelVersion


class Unreadable(Exception):
    """Graph that its engine cannot read; the message says why."""


def signature_of(version: ModelVersion) -> stock.Signature | None:
    """Return the tensors of a version's graph; None if it has none that can be read here. Raises Unreadable.

    For a plan, return those of the graph that it was compiled from, if that lies beside it.
    """
    backend = version.model.config.backend
    path = version.graph if backend != tensorrt.BACKEND else version.recipe / "model.onnx"
    if not path.is_file() or (backend == openvino.BACKEND and not path.with_suffix(".bin").is_file()):
        return None
    return _signature(backend, path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _signature(backend: str, path: Path, changed_ns: int) -> stock.Signature | None:
    """Read a graph once for all rules: it may have gigabytes of weights."""
    try:
        if backend == openvino.BACKEND:
            return openvino.signature(path)
        if backend not in (onnxruntime.BACKEND, tensorrt.BACKEND):
            return None
        signature = onnxruntime.signature(path)
    except (DecodeError, OSError, RuntimeError, ValueError) as error:
        raise Unreadable((str(error).strip().splitlines() or [repr(error)])[-1]) from error
    if not signature.outputs:
        raise Unreadable("it has no outputs")
    return signature


def readable(version: ModelVersion) -> stock.Signature | None:
    """Return the result of `signature_of`, but None for a graph that cannot be read: another rule reports that."""
    try:
        return signature_of(version)
    except Unreadable:
        return None
