"""Write graphs with what this ONNX Runtime answers (`write FOLDER`), compare another version's answers (`run FOLDER`).

`run` imports numpy and onnxruntime only: it is run in environments that have nothing else.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

TOLERANCE = 1e-5


def write(folder: Path) -> None:
    """fp32 and int8 graphs of every architecture of the tests, with inputs of mixed lengths and their outputs."""
    from builder.checkpoint import quiet_libraries, resolve
    from builder.engines.onnxruntime import infer_with, open_session
    from builder.export.encoder import export
    from builder.optimise.fusion import fuse
    from builder.optimise.quantisation import quantise
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
        fused = fuse(export(resolve(spec), spec, place).graph, place, 1)
        mine = {key: feeds[key] for key in fused.inputs}
        int8 = quantise(fused, place, lambda graph: 1.0, 0.0, [mine]).graph
        for graph in (fused, int8):
            (logits,) = infer_with(open_session(graph.path, 1))(mine).values()
            np.savez(graph.path.with_suffix(".npz"), expected=logits, **mine)


def run(folder: Path) -> None:
    """Compare every graph below `folder`; exit 1 where one does not load or answers otherwise."""
    onnxruntime.set_default_logger_severity(4)
    wrong, graphs = [], sorted(folder.glob("*/*/model.npz"))
    for file in graphs:
        feeds = dict(np.load(file))
        expected = feeds.pop("expected")
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


if __name__ == "__main__":
    {"write": write, "run": run}[sys.argv[1]](Path(sys.argv[2]))
