"""Architectures that answer the same on each ONNX Runtime, by precision: into docs/releases.json.

python -m scripts.release_matrix [--versions V ...] [--only TYPE ...]

The file's rows of other architectures and versions stay. Each graph is created once, and its calls recorded on this
build's own ONNX Runtime: batches of mixed lengths, rows in pieces, past their windows and together. They then run again
on the other versions, as a build does it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builder.building.variants.candidates import VariantMaker
from builder.building.verify.emitted import PromptedRequest, answer
from builder.building.verify.generation import geometry_of
from builder.building.verify.recording import STEPS, Case, Recorder, drive, graph_case, past_the_window
from builder.building.verify.runtimes import EngineUnavailable, difference, environment, replayed
from builder.building.verify.seq2seq import Graphs
from builder.checkpoints.libraries import quiet_libraries
from builder.checkpoints.resolve import resolve
from builder.common.releases import OPERATOR_NEEDS, RELEASES, version_tuple
from builder.engines.encoding import Variant
from builder.engines.onnxruntime.older import for_runtime
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.export.encoder import export
from builder.graphs.export.seq2seq import export_seq2seq
from builder.graphs.onnx.graph import Graph, operator_needs
from builder.graphs.onnx.searches import for_searches
from builder.options import WeightOptions, make_spec
from builder.runtime.contract import Session
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from tests.decoders import DECODERS, make_decoder
from tests.models import minilm
from tests.seq2seqs import SEQ2SEQS, make_seq2seq
from tests.tiny_encoders import ARCHITECTURES, VOCABULARY, make_checkpoint

FILE = Path(__file__).parent.parent / "docs" / "releases.json"
BEAMS = 2
PROMPTS = ([5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [20, 21, 22])


@dataclass(frozen=True)
class Row:
    """One line of the table: a graph, and how to run its calls on another version."""

    model_type: str
    kind: str
    precision: str
    own: tuple[Graph, ...]
    case: Callable[[Sequence[Graph]], Case]


def encoders(name: str, folder: Path) -> Iterator[Row]:
    lengths = np.array([3, 40, 25])
    mask = (np.arange(40) < lengths[:, None]).astype(np.int64)
    ids = np.random.default_rng(0).integers(100, 350, mask.shape) * mask
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": mask * 0, "positions": lengths[:, None] - 2}
    if name == "minilm":  # the real weights, by which 8 bits are judged
        spec = make_spec(model=str(minilm()), name="model", max_length=64)
    else:
        spec = make_spec(model=str(make_checkpoint(folder / "checkpoint", name, "fill-mask")), name="model")
    exported = export(resolve(spec), folder).graph
    mine = {key: feeds[key] for key in exported.inputs}
    maker = VariantMaker(spec, exported, folder, [mine])
    for precision in ("fp32", "fp16", "int8", "int8-static"):
        graph = maker.make(Variant(precision, "onnxruntime")).graph
        yield Row(name, "encoder", precision, (graph,), lambda served: graph_case(served[0], [mine], 1))


def decoders(name: str, folder: Path) -> Iterator[Row]:
    exported = export_decoder(make_decoder(name), folder, 128)
    exact = fuse(exported.graph, folder)
    for precision in ("fp32", "int8", "int8-weights"):
        graph = exact
        if precision != "fp32":
            graph = quantise_weights(exact, precision, WeightOptions(32, True), folder).graph
        long = past_the_window(graph, list(range(5, 45)), 128)
        geometry = geometry_of(exported.caches, 1 + len(PROMPTS), len(long) + STEPS, VOCABULARY)
        recorder = Recorder(InProcess(graph.path, geometry, Session(threads=1)))
        drive(recorder.executor, PROMPTS, long)

        def case(served: Sequence[Graph], recorder: Recorder = recorder) -> Case:
            return recorder.case(served[0].path.name, served, 1, remote=True)

        yield Row(name, "decoder", precision, (graph,), case)


def seq2seqs(name: str, folder: Path) -> Iterator[Row]:
    """Yield encoder-decoders in process alone, with the inputs that searches need: that is how they are served.

    The search ends before the rows beside it, which then continue in steps without a search.
    """
    exported = export_seq2seq(make_seq2seq(name), folder, BEAMS)
    exact = [for_searches(fuse(exported.decoder, folder), BEAMS, folder), fuse(exported.encoder, folder)]
    for precision in ("fp32", "int8", "int8-weights"):
        both = exact
        if precision != "fp32":
            both = [quantise_weights(graph, precision, WeightOptions(32, True), folder).graph for graph in exact]
        graphs = Graphs(both[1], both[0], exported.caches, exported.cross, BEAMS, VOCABULARY)
        recorder = Recorder(graphs.executor(len(PROMPTS) + BEAMS, STEPS + 1, max(map(len, PROMPTS)), 1))
        asked = [_asked(source, 1, STEPS) for source in PROMPTS]
        answer(recorder.executor, [*asked, _asked(PROMPTS[0], BEAMS, STEPS // 2)])

        def case(served: Sequence[Graph], recorder: Recorder = recorder) -> Case:
            return recorder.case(served[0].path.name, served, 1)

        yield Row(name, "encoder-decoder", precision, tuple(both), case)


def _asked(source: Sequence[int], beams: int, count: int) -> PromptedRequest:
    """Return a request for an answer of exactly `count` tokens to `source`."""
    return PromptedRequest(
        (2,), Rules(RequestOptions(temperature=0.0, num_beams=beams), max_tokens=count), tuple(source)
    )


def outcome(row: Row, version: str, folder: Path) -> str:
    """Return verified, refused with the reason, or wrong."""
    if row.kind == "encoder-decoder" and version not in {release.in_process for release in RELEASES.values()}:
        return "refused: encoder-decoders run in process, in the version that their requirements pin"
    for need in [need for graph in row.own for need in operator_needs(graph)]:
        if version_tuple(version) < version_tuple(OPERATOR_NEEDS[need]):
            return f"refused: {need} is right from {OPERATOR_NEEDS[need]}"
    case = row.case([for_runtime(graph, version, folder / graph.path.stem) for graph in row.own])
    (outputs,) = replayed(environment("onnxruntime", version), [case.job])
    if isinstance(outputs, str):
        return f"does not run: {outputs[:200]}"
    error = difference(list(case.answers), outputs, case.by_norm)
    return "verified" if error <= case.tolerance else f"wrong: off by {error:.0e}"


@quiet_libraries()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    versions = list(dict.fromkeys([r.onnxruntime for r in RELEASES.values()]))
    parser.add_argument("--versions", nargs="+", default=versions)
    parser.add_argument("--only", nargs="+", default=[*ARCHITECTURES, "minilm", *DECODERS, *SEQ2SEQS])
    options = parser.parse_args()
    table = read_table()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            scratch = Path(folder, name)
            rows = decoders if name in DECODERS else seq2seqs if name in SEQ2SEQS else encoders
            for row in rows(name, scratch):
                runs = {v: outcome(row, v, scratch / f"{row.precision}-{v}") for v in options.versions}
                print(name, row.precision, *(f"{v}: {result};" for v, result in runs.items()), flush=True)
                known = table.get((name, row.precision), {}).get("runtimes", {})
                runs = dict(sorted({**known, **runs}.items(), key=lambda run: version_tuple(run[0])))
                table[name, row.precision] = {
                    "model_type": name, "kind": row.kind, "precision": row.precision, "runtimes": runs,
                }  # fmt: skip
            write_table(table)
    return int(
        any(result.startswith(("wrong", "does")) for row in table.values() for result in row["runtimes"].values())
    )


def read_table() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of the file by architecture and precision."""
    graphs = json.loads(FILE.read_text("utf-8"))["graphs"] if FILE.exists() else []
    return {(row["model_type"], row["precision"]): row for row in graphs}


def write_table(table: dict[tuple[str, str], dict[str, Any]]) -> None:
    releases = {n: {"backend": r.onnxruntime, "in_process": r.in_process} for n, r in RELEASES.items()}
    FILE.write_text(json.dumps({"releases": releases, "graphs": list(table.values())}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EngineUnavailable as reason:
        sys.exit(f"scripts/releases: an ONNX Runtime is not at hand: {reason}")
