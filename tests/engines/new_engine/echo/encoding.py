"""Encoders in fp32, of standard operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from builder.engines.encoding import EncodingEngine, Variant
from builder.engines.optimise import Quantised
from builder.graphs.onnx.graph import load_graph, save_graph


class EchoEncoding(EncodingEngine):
    name = "echo"
    titles: ClassVar = {"cpu": "Echo"}
    variants = (Variant("fp32", "echo"),)

    def finish(self, quantised: Quantised, precision: str, path: Path) -> Quantised:
        saved = save_graph(load_graph(quantised.graph.path), path.with_name("model.echo"))
        return replace(quantised, graph=replace(saved, engine=self.name))


ENCODING = EchoEncoding()
