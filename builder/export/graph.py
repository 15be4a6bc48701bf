"""An exported model on disk, and what can be read off it.

Knows ONNX files; knows nothing about how they were made.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx

from builder.engines.releases import OPERATOR_NEEDS, RELEASES, version_tuple
from builder.errors import ExportError


@dataclass(frozen=True)
class Graph:
    """One model file with its signature. `operators` counts nodes by operator type.

    `engine` is the Triton backend it is for, `arithmetic` what that computes real products in: fp32 or bf16.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_dims: tuple[tuple[int, ...], ...]  # batch excluded, -1 for any size
    opset: int
    ir_version: int
    operators: Counter[str]
    size: int  # bytes, weights included
    engine: str = "onnxruntime"
    arithmetic: str = "fp32"

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, and the file of its weights where that is another."""
        return tuple(sorted(self.path.parent.glob(f"{self.path.stem}.*")))


EXTERNAL_FROM = 1_500_000_000  # bytes of weights; protobuf itself ends at 2 GiB


def save_graph(model: onnx.ModelProto, path: Path) -> Graph:
    """Write `model`, the same bytes for the same model; large weights go to a file beside it."""
    weights = {tensor.name for tensor in model.graph.initializer}
    described = [value for value in model.graph.value_info if value.name in weights]
    for value in described:  # said twice, and wrong as soon as a tool transposes the weight
        model.graph.value_info.remove(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)  # onnx would append to it
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < EXTERNAL_FROM:
        path.write_bytes(model.SerializeToString(deterministic=True))
    else:
        onnx.save_model(model, str(path), save_as_external_data=True, location=data.name)
    return read_graph(path)


def read_graph(path: Path) -> Graph:
    """Read the signature and operators of an ONNX file."""
    model = onnx.load(str(path), load_external_data=False)
    return Graph(
        path=path,
        inputs=tuple(value.name for value in model.graph.input),
        outputs=tuple(value.name for value in model.graph.output),
        output_dims=tuple(
            tuple(d.dim_value or -1 for d in value.type.tensor_type.shape.dim)[1:] for value in model.graph.output
        ),
        opset=next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")),
        ir_version=model.ir_version,
        operators=Counter(node.op_type for node in model.graph.node),
        size=sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*")),
        arithmetic="bf16" if any(t.data_type == onnx.TensorProto.BFLOAT16 for t in model.graph.initializer) else "fp32",
    )


def operator_needs(graph: Graph) -> list[str]:
    """What of OPERATOR_NEEDS a graph uses, the newest first."""
    model = onnx.load(str(graph.path), load_external_data=False)
    needs = set()
    for node in model.graph.node:
        if node.op_type != "GroupQueryAttention":
            continue
        needs.add("GroupQueryAttention on CPU")
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        if attributes.get("softcap"):
            needs.add("GroupQueryAttention with softcap")
        if attributes.get("kv_cache_bit_width"):
            needs.add("GroupQueryAttention with an int8 cache")
        if len(node.input) > 10 and node.input[10]:
            needs.add("GroupQueryAttention with attention_bias")
    return sorted(needs, key=lambda need: version_tuple(OPERATOR_NEEDS[need]), reverse=True)


def check_release(graph: Graph, triton: str) -> None:
    """Refuse a graph that the ONNX Runtime of a Triton release cannot read. Raises ExportError."""
    release = RELEASES[triton]
    for need in operator_needs(graph):
        if version_tuple(OPERATOR_NEEDS[need]) > version_tuple(release.onnxruntime):
            found = [
                n for n, r in RELEASES.items() if version_tuple(r.onnxruntime) >= version_tuple(OPERATOR_NEEDS[need])
            ]
            raise ExportError(
                f"{graph.path.name} uses {need}, which ONNX Runtime has from {OPERATOR_NEEDS[need]}; Triton {triton} "
                f"has {release.onnxruntime}. "
                + (f"Build for Triton {found[0]} or later" if found else "No known release has it")
            )
    if graph.opset <= release.opset and graph.ir_version <= release.ir_version:
        return
    newer = [n for n, r in RELEASES.items() if graph.opset <= r.opset and graph.ir_version <= r.ir_version]
    raise ExportError(
        f"{graph.path.name} needs opset {graph.opset} and IR version {graph.ir_version}; Triton {triton} (ONNX Runtime "
        f"{release.onnxruntime}) reads up to {release.opset} and {release.ir_version}. "
        + (f"Build for Triton {newer[0]} or later" if newer else "No known release reads it")
    )
