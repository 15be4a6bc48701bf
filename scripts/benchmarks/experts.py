"""A token of a mixture of experts of a real shape: reading the chosen experts alone beside running all of them.

Weights are random, and so are the tokens, which are new at each step: the router chooses others each time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from builder.building.verify.generation import geometry_of
from builder.common.machine import available_cores
from builder.engines.decoding import opened
from builder.engines.openvino.lowering import page_attention
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import DecoderExport, export_decoder
from builder.graphs.onnx.experts import run_all_experts
from builder.graphs.onnx.graph import Graph
from builder.options import WeightOptions
from scripts.benchmarks.circumstances import circumstances
from scripts.benchmarks.machine_limits import machine_limits

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
BYTES = {"fp32": 4.0, "int8-weights": 1 + 4 / 32, "int4-weights": 0.5 + 4 / 32}  # of a weight, its scale included
STEPS, ROWS, CONTEXT = 30, (1, 8), 64


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench experts")
    parser.add_argument("--precisions", default=",".join(BYTES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmoe", **SHAPE)).eval()
        exported = export_decoder(model, folder, 4 * CONTEXT)
        weights = sum(parameter.numel() for parameter in model.parameters())
        del model
        graphs = {name: forms(exported, name, folder / name) for name in options.precisions.split(",")}
        bandwidth = machine_limits()["bandwidth"]
        report: dict[str, Any] = {**circumstances(), "bandwidth": round(bandwidth, 1), "ms a token": {}}
        for precision, forms_of in graphs.items():
            every, active = (BYTES[precision] * count / 1e6 for count in (weights, active_weights(weights)))
            figures = {name: step_times(exported, graph) for name, graph in forms_of.items()}
            figures["limit"] = {"chosen": round(active / bandwidth, 2), "all": round(every / bandwidth, 2)}
            report["ms a token"][precision] = figures
    print(json.dumps(report, indent=1))


def forms(exported: DecoderExport, precision: str, folder: Path) -> dict[str, Graph]:
    """Return the graphs in `precision`: chosen experts and all of them, on ONNX Runtime and on OpenVINO."""
    every = run_all_experts(exported.graph, folder)
    graphs = {
        "chosen, ONNX Runtime": fuse(exported.graph, folder),
        "all, ONNX Runtime": fuse(every, folder / "all"),
        "chosen, OpenVINO": page_attention(exported.graph, folder / "openvino"),
        "all, OpenVINO": page_attention(every, folder / "openvino-all"),
    }
    if precision == "fp32":
        return graphs
    options = WeightOptions(32, symmetric=True)
    return {
        name: quantise_weights(graph, precision, options, folder / str(place)).graph
        for place, (name, graph) in enumerate(graphs.items())
    }


def active_weights(weights: int) -> int:
    """Return how many of all `weights` a token reads."""
    one = 3 * SHAPE["hidden_size"] * SHAPE["intermediate_size"] * SHAPE["num_hidden_layers"]
    return weights - one * (SHAPE["num_experts"] - SHAPE["num_experts_per_tok"])


def step_times(exported: DecoderExport, graph: Graph) -> dict[str, float]:
    """Return the median time of a step after `CONTEXT` tokens, by rows, in milliseconds."""
    geometry = geometry_of(exported.caches, max(ROWS), 4 * CONTEXT, SHAPE["vocab_size"])
    executor = opened(graph, available_cores())(geometry)
    generator = np.random.default_rng(0)
    times = {}
    for rows in ROWS:
        lengths = np.full(rows, CONTEXT, np.int64)
        prompts = generator.integers(5, SHAPE["vocab_size"], (rows, CONTEXT))
        executor.run(0, prompts, np.zeros(rows, np.int64))
        taken = []
        for _ in range(STEPS):
            tokens = generator.integers(5, SHAPE["vocab_size"], (rows, 1))
            start = time.perf_counter()
            executor.run(0, tokens, lengths)
            taken.append(time.perf_counter() - start)
        times[f"{rows} rows"] = round(1000 * median(taken), 2)
    return times


if __name__ == "__main__":
    main()
