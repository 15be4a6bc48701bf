"""Open the executor that serving.json describes, for ONNX Runtime in this process."""

from __future__ import annotations

from pathlib import Path

from ...contract import GenerationServing
from .base import CrossGeometry, Executor, Geometry
from .cross_attending import CrossAttending
from .cuda import Cuda
from .cuda_blocks import CudaBlocks
from .in_process import InProcess


def open_executor(folder: Path, serving: GenerationServing, geometry: Geometry) -> Executor:
    """Open the graphs in `folder`: an encoder-decoder's, a decoder's on the CPU, or a decoder's on a GPU.

    On a GPU the cache is in slots or in blocks.
    """
    assert serving.model is not None
    model, source, session = folder / serving.model, serving.source, serving.session
    if source is not None:
        shape = CrossGeometry(source.max_length, serving.beams, Geometry.pairs(source.layers))
        return CrossAttending(model, folder / source.encoder, geometry, shape, session)
    if session.device == "cpu":
        return InProcess(model, geometry, session)
    assert serving.copier is not None
    copier = folder / serving.copier
    if geometry.blocks is not None:
        return CudaBlocks(model, copier, geometry, session)
    return Cuda(model, copier, geometry, session)
