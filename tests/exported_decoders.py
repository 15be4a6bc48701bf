"""Tiny decoders as an export and the fusion leave them, beside the PyTorch model that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from builder.building.verify.generation import geometry_of
from builder.engines.optimise.fusion import fuse
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.graph import Graph
from builder.runtime.contract import LayerShape, Session
from builder.runtime.generation.executors.onnxruntime import InProcess
from tests.decoders import make_decoder
from tests.tiny_encoders import VOCABULARY

LENGTH = 128


@dataclass(frozen=True)
class ExportedDecoder:
    """Model of `LENGTH` tokens, its graph as exported and as fused, and the caches of its layers."""

    model: PreTrainedModel
    graph: Graph
    layers: tuple[LayerShape, ...]
    fused: Graph

    def executor(self, slots: int) -> InProcess:
        geometry = geometry_of(self.layers, slots, LENGTH, VOCABULARY)
        return InProcess(self.fused.path, geometry, Session(threads=1))


def exported_decoder(model_type: str, folder: Path) -> ExportedDecoder:
    """Export the tiny model of `model_type` into `folder`."""
    model = make_decoder(model_type)
    result = export_decoder(model, folder, LENGTH)
    return ExportedDecoder(model, result.graph, result.caches, fuse(result.graph, folder))
