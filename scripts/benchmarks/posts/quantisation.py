"""Quantisation (post 4): dynamic and static on a real model; mBART and t5-small from `scripts/bench seq2seq`."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from transformers import AutoTokenizer

from builder.building.pipeline import build
from builder.building.variants.candidates import VariantMaker
from builder.checkpoints.resolve import resolve
from builder.common.machine import available_cores
from builder.common.samples import TEXTS
from builder.engines import infer_with
from builder.engines.encoding import Variant
from builder.graphs.export.encoder import export
from builder.graphs.onnx.nodes import constant_products
from builder.options import make_spec
from builder.runtime.contract import Session
from builder.runtime.sessions import open_session
from scripts.benchmarks import peers, seq2seq
from scripts.benchmarks.posts import Row, alone, median_ms
from tests.models import minilm

RECORDED = Path(__file__).parent.parent.parent.parent / "docs" / "seq2seq.json"
ARITHMETIC = (
    Variant("fp32", "onnxruntime"),
    Variant("int8", "onnxruntime"),
    Variant("int8-static", "onnxruntime"),
    Variant("int8-static", "openvino"),
)
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16 OpenVINO", {"precision": "bf16"}),
    ("dynamic int8", {"precision": "int8"}),
    ("static int8, not smoothed", {"precision": "int8-static", "calibration": {"smooth": 0.0}}),
    ("static int8", {"precision": "int8-static"}),
    ("static int8, entropy", {"precision": "int8-static", "calibration": {"method": "entropy"}}),
    ("static int8 OpenVINO", {"precision": "int8-static", "engine": "openvino"}),
)


def static_and_dynamic(folder: Path, environments: Path) -> list[Row]:
    """Measure the real MiniLM on 8 texts of 128 tokens: milliseconds and mean cosine to PyTorch."""
    rows: list[Row] = []
    for title, options in VARIANTS:
        spec = make_spec(model=str(minilm()), name="minilm", output=folder / "minilm", quality=0.9, **options)
        base, exact, *rest = alone(build, spec).variants
        if not rows:
            rows.append(Row("PyTorch", f"{base.latency_ms['8x128']:.0f} ms, cosine 1", 1.0))
            ratio = base.latency_ms["8x128"] / exact.latency_ms["8x128"]
            rows.append(Row("fused fp32", f"{exact.latency_ms['8x128']:.0f} ms, cosine 1.0000", ratio))
        ms = rest[-1].latency_ms["8x128"]
        ratio = base.latency_ms["8x128"] / ms
        rows.append(Row(title, f"{ms:.0f} ms, cosine {rest[-1].quality:.4f}", ratio))
    return rows


def arithmetic(folder: Path, environments: Path) -> list[Row]:
    """Measure the 8-bit operations a second of MiniLM's products (32 rows of 64 tokens) and the share of the peak."""
    peak = alone(_int8_peak)
    rows = [Row("one large 8-bit product, ONNX Runtime", f"{peak:.0f} GOP/s")]
    first = None
    for variant in ARITHMETIC:
        operations, ms = alone(_timed, folder, variant)
        first = first or ms
        rate = operations / ms / 1e6
        rows.append(Row(variant.name, f"{ms:.1f} ms, {rate:.0f} GOP/s, {rate / peak:.0%}", first / ms))
    return rows


def _timed(scratch: Path, variant: Variant) -> tuple[float, float]:
    """Return the operations of the products with weights, and the ms."""
    rows, length = 32, 64
    spec = make_spec(model=str(minilm()), name="minilm")
    checkpoint = resolve(spec)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        tokens = dict(checkpoint.tokenizer(list(TEXTS), return_tensors="np", padding=True))
        maker = VariantMaker(spec, export(checkpoint, Path(folder)).graph, Path(folder), [tokens])
        products = constant_products(onnx.load(str(maker.exported.path)).graph)
        sizes = {t.name: int(np.prod(t.dims)) for t in onnx.load(str(maker.exported.path)).graph.initializer}
        graph = maker.make(variant).graph
        ids = np.random.default_rng(0).integers(1000, 20000, (rows, length))
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        run = infer_with(graph, available_cores(), spinning=True)
        operations = 2 * rows * length * sum(sizes[node.input[1]] for node in products)
        return operations, median_ms(lambda: run({name: feed[name] for name in graph.inputs}), least=15)


def _int8_peak() -> float:
    """Return the GOP/s of ONNX Runtime's own 8-bit product on a large square."""
    size = 2048
    weight = numpy_helper.from_array(np.ones((size, size), np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "peak",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [size, size])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [size, size])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, f"{folder}/peak.onnx")
        session = open_session(Path(folder) / "peak.onnx", Session(threads=available_cores()))
    feeds = {"x": np.ones((size, size), np.uint8)}
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        session.run(None, feeds)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds) / 1e9


def encoder_decoders(folder: Path, environments: Path) -> list[Row]:
    """Return the recorded tokens a second of one greedy client, as measured by `scripts/bench seq2seq`."""
    claims = {("mbart-large-50", "transformers dynamic int8"): "3.7x", ("t5-small", "ours fp32"): "2.7x by Optimum O3"}
    rows = []
    for model, sides in json.loads(RECORDED.read_text())["models"].items():
        if model not in ("mbart-large-50", "t5-small"):
            continue
        base = sides["transformers eager"]["1/1"]["tokens_per_s"]
        for side, cells in sides.items():
            speed = cells.get("1/1", {}).get("tokens_per_s")
            if speed is not None:
                claim = claims.get((model, side), "")
                rows.append(Row(f"{model}, {side}", f"{speed:.0f} tokens/s", speed / base, claim))
    return rows


def optimum_level(folder: Path, environments: Path) -> list[Row]:
    """Measure Optimum's own export and its O3 on t5-small's shape with random weights, one client, greedy."""
    checkpoint = seq2seq.make_checkpoint("t5-small", folder / "t5-small")
    work = seq2seq.make_work(AutoTokenizer.from_pretrained(checkpoint), 8)
    path = folder / "work.json"
    path.write_text(json.dumps(seq2seq.work_document(work, concurrency=1, beams=1)))
    rows: list[Row] = []
    base = None
    for title, peer, kind in seq2seq.PEERS:
        if kind not in ("eager", "fp32", "O3"):
            continue
        rate = peers.run(peer, environments, path, checkpoint, kind)["tokens_per_s"]
        base = base or rate
        rows.append(Row(title, f"{rate:.0f} tokens/s", rate / base, "2.7x" if kind == "O3" else ""))
    return rows
