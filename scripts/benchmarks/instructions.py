"""Measure what an instruction before each query costs a decoder that embeds, and what computing it once saves.

Layers of Qwen3-Embedding-0.6B's sizes, random weights, in this process, without Triton, by the calls that the front
cuts a batch into. `shared` computes equal beginnings of a call's rows once and leaves the padding out; `kept` has
queries without their instruction, the least that remains if its keys and values are kept between calls. Sides take
turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from builder.building.variants.candidates import VariantMaker, requested_variants
from builder.building.variants.evaluator import make_evaluator
from builder.checkpoints.libraries import quiet_libraries
from builder.checkpoints.resolve import resolve
from builder.common.machine import available_cores, cpu
from builder.common.tensors import to_tensors
from builder.engines import infer_with
from builder.graphs.export.encoder import export
from builder.options import make_spec
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.fields import Tensors
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.retrieval_models import qwen3_embedding
from scripts.benchmarks.traffic import mixed_texts

INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"  # Qwen3's
LONGEST_QUERY, LONGEST_DOCUMENT = 50, 256  # tokens; the shortest have 8
COUNTS = (1, 8, 32)


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench instructions")
    parser.add_argument("--precisions", default="fp32,int8", help="of ONNX Runtime")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON; those of other precisions stay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        qwen3_embedding(checkpoint, options.layers)
        settings = checkpoint / "config_sentence_transformers.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "prompts": {"query": INSTRUCTION}}))
        for precision in options.precisions.split(","):
            cells = measure(checkpoint, Path(scratch) / precision, precision, options.rounds)
            Console(width=110).print(_table(precision, cells))
            if options.output:
                figures = {**circumstances(), "layers": options.layers, "precisions": {precision: cells}}
                write_figures(options.output, figures)


def measure(model: Path, folder: Path, precision: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return, by kind and number of texts, the tokens, the lowest cosine of both graphs, and milliseconds by side."""
    spec = make_spec(model=str(model), precision=precision, engine="onnxruntime", max_length=512)
    checkpoint, fronts = resolve(spec), []
    variant = requested_variants(spec, cpu()["flags"])[0]
    for shares in (False, True):
        own = folder / str(shares)
        exported = export(checkpoint, own, shares)
        evaluator = make_evaluator(spec, checkpoint, exported.module, exported.graph, own, exported.shares_prefixes)
        graph = VariantMaker(spec, exported.graph, own, evaluator.feeds).make(variant).graph
        fronts.append(Pipeline(evaluator.front, infer_with(graph, available_cores())))
    each, shared = fronts
    requests = partial(to_tensors, fields=evaluator.fields[0])

    def tokens(text: str) -> int:
        return len(checkpoint.tokenizer(text)["input_ids"])

    longest = {"queries": LONGEST_QUERY, "documents": LONGEST_DOCUMENT}
    cells = {}
    for kind, most in longest.items():
        texts = mixed_texts(tokens, COUNTS[-1], most=most)
        prompt = {"prompt_name": "query"} if kind == "queries" else {}
        for count in COUNTS:
            batch = [requests({"text_input": text, **prompt}) for text in texts[:count]]
            sides = {"each": partial(_embed, each, batch), "shared": partial(_embed, shared, batch)}
            if prompt:
                sides["kept"] = partial(_embed, each, [requests({"text_input": text}) for text in texts[:count]])
            agreement = (sides["each"]() * sides["shared"]()).sum(axis=1).min()
            cells[f"{count} {kind}"] = {"agreement": float(agreement), **_milliseconds(sides, rounds)}
    return cells


def _embed(front: Pipeline, batch: Sequence[Tensors]) -> np.ndarray:
    """Return the embeddings, (texts, size)."""
    answers = front(batch)
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    if errors:
        raise errors[0]
    return np.concatenate([answer["embedding"] for answer in answers if not isinstance(answer, Exception)])


def _milliseconds(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each side; they take turns, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: 1000 * median(every[1:]) for name, every in times.items()}


def _table(precision: str, cells: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=precision, title_justify="left")
    for heading in ("texts", "agreement", "each, ms", "shared, ms", "kept, ms"):
        table.add_column(heading, justify="right")
    for name, cell in cells.items():
        times = [f"{cell[side]:.1f}" if side in cell else "" for side in ("each", "shared", "kept")]
        table.add_row(name, f"{cell['agreement']:.6f}", *times)
    return table


if __name__ == "__main__":
    main()
