"""Write graphs with what this ONNX Runtime answers (`write FOLDER`), compare another version's answers (`run FOLDER`),
and find the highest opset and IR version that one reads (`limits`).

`run` and `limits` import numpy and onnxruntime only: they are run in environments that have nothing else.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

TOLERANCE = 1e-5


def write(folder: Path) -> None:
    """fp32, int8 and int8-static graphs of every architecture of the tests, inputs of mixed lengths, their outputs."""
    from builder.checkpoint import quiet_libraries, resolve
    from builder.engines.onnxruntime import infer_with, open_session
    from builder.export.encoder import export
    from builder.optimise.variants import Variant, Workshop
    from builder.spec import make_spec
    from tests.checkpoints import ARCHITECTURES, make_checkpoint

    quiet_libraries()
    lengths = np.array([3, 40, 25])
    mask = (np.arange(40) < lengths[:, None]).astype(np.int64)
    ids = np.random.default_rng(0).integers(100, 350, mask.shape) * mask
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": mask * 0, "positions": lengths[:, None] - 2}
    for name in ARCHITECTURES:
        place = folder / name
        spec = make_spec(model=str(make_checkpoint(place / "checkpoint", name, "fill-mask")), name="model")
        exported = export(resolve(spec), spec, place).graph
        mine = {key: feeds[key] for key in exported.inputs}
        workshop = Workshop(spec, exported, place, [mine])
        for precision in ("fp32", "int8", "int8-static"):
            graph = workshop.make(Variant(precision, "onnxruntime")).graph
            (logits,) = infer_with(open_session(graph.path, 1))(mine).values()
            np.savez(graph.path.with_suffix(".npz"), expected=logits, needs="1.17.0", **mine)
    _write_decoders(folder)


def _write_decoders(folder: Path) -> None:
    """fp32 and int8 graphs of every decoder of the tests, with a second step over two rows of a cache."""
    from builder.engines.onnxruntime import infer_with, open_session
    from builder.engines.releases import OPERATOR_NEEDS
    from builder.export.decoder import export_decoder
    from builder.export.graph import operator_needs
    from builder.optimise.decoder_weights import WeightOptions, quantise_weights
    from builder.optimise.fusion import fuse
    from tests.decoders import DECODERS, make_decoder

    ids = np.random.default_rng(0).integers(5, 600, (2, 9))
    for name in DECODERS:
        place = folder / f"{name}-decoder"
        exported = export_decoder(make_decoder(name), place, 64)
        fused = fuse(exported.graph, place)
        for graph in (fused, quantise_weights(fused, "int8", WeightOptions(32, True), place).graph):
            infer = infer_with(open_session(graph.path, 1))
            past = {n: np.zeros((2, *_cache(n, exported.caches)), np.float32) for n in graph.inputs if n[:5] == "past_"}
            first = infer({**past, **_step(graph.inputs, ids, 0)})
            past = {n: first[n.replace("past_", "present_")] for n in past}
            feeds = {**past, **_step(graph.inputs, ids[:, :1], 9)}
            needs = OPERATOR_NEEDS[operator_needs(graph)[0]]
            np.savez(graph.path.with_suffix(".npz"), expected=infer(feeds)["logits"], needs=needs, **feeds)


def _cache(name: str, caches: Any) -> tuple[int, int, int]:
    shape = caches[int(name.rsplit("_", 1)[1])]
    return shape.heads, 0, shape.size


def _step(names: tuple[str, ...], ids: np.ndarray, held: int) -> dict[str, np.ndarray]:
    rows, new = ids.shape
    feeds = {
        "input_ids": ids,
        "position_ids": np.tile(np.arange(held, held + new), (rows, 1)),
        "seqlens_k": np.full(rows, held + new - 1, np.int32),
        "total_sequence_length": np.array([held + new], np.int32),
        "logits_index": np.full(rows, new - 1),
    }
    return {name: array for name, array in feeds.items() if name in names}


def run(folder: Path) -> None:
    """Compare every graph below `folder`; exit 1 where one does not load or answers otherwise."""
    onnxruntime.set_default_logger_severity(4)
    wrong, graphs = [], []
    for file in sorted(folder.glob("*/*/model.npz")):
        feeds = dict(np.load(file))
        expected, needs = feeds.pop("expected"), str(feeds.pop("needs"))
        if _version(onnxruntime.__version__) < _version(needs):
            continue  # a build for a release with this version is refused
        graphs.append(file)
        name = str(file.parent.relative_to(folder))
        try:
            session = onnxruntime.InferenceSession(str(file.with_suffix(".onnx")), providers=["CPUExecutionProvider"])
            error = float(np.abs(session.run(None, feeds)[0] - expected).max() / np.abs(expected).max())
        except Exception as problem:
            wrong.append(f"{name}: {problem}")
            continue
        if not error <= TOLERANCE:
            wrong.append(f"{name}: off by {error:.1e}")
    print(f"ONNX Runtime {onnxruntime.__version__}: {len(graphs) - len(wrong)} of {len(graphs)} graphs answer the same")
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))


def limits() -> None:
    """The line of releases.toml for this version."""
    onnxruntime.set_default_logger_severity(4)
    opset = max(opset for opset in range(13, 40) if _reads(opset, 8))
    ir_version = max(ir for ir in range(8, 30) if _reads(opset, ir))
    print(f'"{onnxruntime.__version__}" = [{opset}, {ir_version}]')


def _reads(opset: int, ir_version: int) -> bool:
    try:
        onnxruntime.InferenceSession(_identity(opset, ir_version), providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True


def _identity(opset: int, ir_version: int) -> bytes:
    """The ModelProto of a graph with one Identity node, in protobuf's own encoding: onnx is not at hand here."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    real = field(1, b"\x08\x01" + field(2, field(1, b"\x08\x01")))  # TypeProto: tensor of FLOAT, shape [1]
    node = field(1, b"x") + field(2, b"y") + field(4, b"Identity")
    graph = field(1, node) + field(2, b"g")
    graph += field(11, field(1, b"x") + field(2, real)) + field(12, field(1, b"y") + field(2, real))
    return b"\x08" + bytes([ir_version]) + field(7, graph) + field(8, field(1, b"") + b"\x10" + bytes([opset]))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3])


if __name__ == "__main__":
    {"write": write, "run": run, "limits": limits}[sys.argv[1]](*map(Path, sys.argv[2:]))
