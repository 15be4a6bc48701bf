"""`scripts/bench gpu`: PyTorch in fp16, ONNX Runtime's CUDA and TensorRT on this machine's GPU, one after the other.

Encoders: the real MiniLM at lengths 16 to 512. Decoders: the GPT-2 124M shape, random weights, a step in the emitted
loop's executor, in fp16 and with weights of 4 bits, all logits copied or the highest; then text through Triton with the
cache in NAME and with the cache handed on through BLS. Each side runs in a process of its own. Needs a GPU, and
onnxruntime-gpu instead of onnxruntime; TensorRT is measured where it can be imported. Without a GPU nothing is measured
and nothing is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel

from builder import Client, build, running
from builder.building.variants.candidates import VariantMaker
from builder.building.verify.generation import geometry_of
from builder.checkpoints.libraries import quiet_libraries
from builder.checkpoints.resolve import resolve
from builder.common.samples import TEXTS
from builder.engines.encoding import Variant
from builder.engines.gpu import gpus
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.half_precision import to_half
from builder.engines.optimise.weights import quantise_weights
from builder.engines.placement import TOKEN_INPUTS
from builder.engines.profiles import Calls, covering_profile, input_shapes
from builder.graphs.export.decoder import export_decoder
from builder.graphs.export.encoder import export
from builder.graphs.onnx.candidates import with_candidates
from builder.graphs.onnx.slots import slot_copier
from builder.options import WeightOptions, make_spec
from builder.runtime.contract import Session
from builder.runtime.generation.executors.base import CallPart
from builder.runtime.generation.executors.cuda import ELEMENTS, PROVIDERS
from builder.runtime.generation.executors.onnxruntime_cuda import Cuda
from scripts.benchmarks.circumstances import replace_figures
from scripts.benchmarks.generators import make_checkpoint
from scripts.benchmarks.posts import alone, median_ms
from tests.models import minilm

SHAPES = tuple((rows, length) for rows in (1, 8, 32) for length in (16, 64, 128, 256, 512))
ROWS = (1, 8, 32)
CONTEXT = 256
ANSWER = 128  # tokens of a served text
Times = dict[str, float]  # "rows x length" or "rows" to milliseconds


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench gpu")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    here = gpus()
    if not here:
        sys.exit("no NVIDIA GPU here (nvidia-smi finds none): nothing was measured")
    if PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
        sys.exit("this onnxruntime has no CUDA: pip uninstall onnxruntime, then pip install onnxruntime-gpu")
    figures: dict[str, Any] = {"gpu": asdict(here[0]), "onnxruntime": onnxruntime.__version__}
    with tempfile.TemporaryDirectory() as folder:
        encoders = {"PyTorch fp16": alone(encode_pytorch, "cuda"), "CUDA fp16": alone(encode, "cuda", Path(folder))}
        if importlib.util.find_spec("tensorrt") is not None:
            encoders["TensorRT fp16"] = alone(encode_tensorrt, Path(folder))
        decoders = {"PyTorch fp16": alone(decode_pytorch, "cuda")}
        for precision in ("fp16", "int4-weights"):
            for few in (False, True):
                name = f"CUDA {precision}, {'the highest' if few else 'all'} logits"
                decoders[name] = alone(decode, "cuda", Path(folder), precision, few)
        served = {executor: alone(serve, executor, Path(folder)) for executor in ("in-process", "bls")}
    figures |= {"encoders": encoders, "decoders": decoders, "served": served}
    console = Console(width=140)
    console.print(_table(f"MiniLM on {here[0].name}, milliseconds, rows x tokens", encoders))
    console.print(_table(f"GPT-2 124M, one token after {CONTEXT}, milliseconds, rows", decoders))
    for executor, rate in served.items():
        console.print(f"GPT-2 124M through Triton, one client, {executor}: {rate:.0f} tokens a second")
    replace_figures(options.output, figures)


def encode_pytorch(device: str, shapes: tuple[tuple[int, int], ...] = SHAPES) -> Times:
    model = AutoModel.from_pretrained(minilm(), dtype=torch.float16).eval().to(device)

    def run_of(feeds: dict[str, np.ndarray]) -> Callable[[], object]:
        tensors = {name: torch.from_numpy(values).to(device) for name, values in feeds.items()}

        def run() -> None:
            with torch.inference_mode():
                model(**tensors).last_hidden_state.float().cpu()

        return run

    return _times(run_of, shapes)


def encode(device: str, folder: Path, shapes: tuple[tuple[int, int], ...] = SHAPES) -> Times:
    """Measure the graph of --target cuda; inputs and outputs pass through the CPU, as they do in Triton."""
    graph = _workshop(folder / "cuda", "cuda").make(Variant("fp16", "onnxruntime", target="cuda")).graph
    session = onnxruntime.InferenceSession(str(graph.path), providers=[PROVIDERS[device]])

    def run_of(feeds: dict[str, np.ndarray]) -> Callable[[], object]:
        return lambda: session.run(None, {name: feeds[name] for name in graph.inputs})

    return _times(run_of, shapes)


def encode_tensorrt(folder: Path) -> Times:
    """Measure the plan of --target tensorrt, as `build-repo compile` makes it."""
    from polygraphy.backend.trt import CreateConfig, Profile, TrtRunner, engine_from_network, network_from_onnx_path

    maker = _workshop(folder / "tensorrt", "tensorrt")
    graph = maker.make(Variant("fp16", "tensorrt", target="tensorrt")).graph
    profile = Profile()  # one runner has one profile: the one that takes every shape that is measured
    every = covering_profile(Calls(maker.spec.max_batch_size, 512, 32 * 512))
    for name, sides in input_shapes(every, graph.inputs, TOKEN_INPUTS).items():
        profile.add(name, sides["min"], sides["opt"], sides["max"])
    network = network_from_onnx_path(str(graph.path), strongly_typed=True)
    engine = engine_from_network(network, config=CreateConfig(profiles=[profile], tf32=False))
    with TrtRunner(engine) as runner:
        return _times(lambda feeds: lambda: runner.infer({name: feeds[name] for name in graph.inputs}), SHAPES)


def decode_pytorch(device: str, rows: tuple[int, ...] = ROWS) -> Times:
    model = _gpt2().half().to(device)
    times = {}
    for count in rows:
        ids = torch.full((count, CONTEXT), 100, device=device)
        with torch.inference_mode():
            past = model(ids, use_cache=True).past_key_values

            def step(ids: torch.Tensor = ids, past: Any = past) -> None:
                model(ids[:, :1], past_key_values=past, use_cache=True).logits.float().cpu()
                past.crop(-1)

            times[str(count)] = median_ms(step)
    return times


def decode(
    device: Literal["cpu", "cuda"], folder: Path, precision: str, few: bool, rows: tuple[int, ...] = ROWS
) -> Times:
    """Measure the executor that --target cuda emits; `few`: only the highest logits are copied."""
    exported = export_decoder(_gpt2(), folder, 2 * CONTEXT)
    graph = fuse(exported.graph, folder)
    if precision != "fp16":
        graph = quantise_weights(graph, precision, WeightOptions(32, True), folder, products_of="cuda").graph
    half = with_candidates(to_half(graph, folder / "half" / "model.onnx", real=("logits",)), folder)
    copier = slot_copier(exported.caches, ELEMENTS["float16"], half, folder)
    geometry = geometry_of(exported.caches, max(rows), 2 * CONTEXT, GPT2Config().vocab_size, "float16")
    executor = Cuda(half.path, copier.path, geometry, Session(device=device))
    times = {}
    for count in rows:
        part = CallPart(0, np.full((count, 1), 100), np.full(count, CONTEXT))
        times[str(count)] = median_ms(partial(executor.best, [part]) if few else partial(executor.run, *part))
    return times


def serve(executor: str, folder: Path) -> float:
    """Return the tokens a second of one client."""
    checkpoint, output = folder / "gpt2", folder / executor
    make_checkpoint("gpt2", checkpoint)
    options = {"target": "cuda", "precision": "fp16", "executor": executor, "slots": 8, "max_length": 2 * CONTEXT}
    build(make_spec(model=str(checkpoint), name="writer", output=output, quality=0.0, perplexity=100, **options))
    request = {"text_input": TEXTS[0], "ignore_eos": True}
    with running(output, timeout_s=300) as server, Client(server.url, "writer") as client:
        client.ask({**request, "max_tokens": 8})
        start = time.perf_counter()
        client.ask({**request, "max_tokens": ANSWER})
        return ANSWER / (time.perf_counter() - start)


def _workshop(folder: Path, target: str) -> VariantMaker:
    folder.mkdir(exist_ok=True)
    spec = make_spec(model=str(minilm()), target=target, max_batch_size=32, max_length=512)
    return VariantMaker(spec, export(resolve(spec), folder).graph, folder, ())


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).eval()


def _times(run_of: Callable[[dict[str, np.ndarray]], Callable[[], object]], shapes: Any) -> Times:
    times = {}
    for rows, length in shapes:
        ids = np.random.default_rng(0).integers(1000, 20000, (rows, length))
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        times[f"{rows}x{length}"] = median_ms(run_of(feeds))
    return times


def _table(title: str, sides: dict[str, Times]) -> Table:
    cells = list(next(iter(sides.values())))
    table = Table(title=title, title_justify="left")
    for column in ("", *cells):
        table.add_column(column, justify="right")
    base = next(iter(sides.values()))
    for name, times in sides.items():
        table.add_row(name, *(f"{times[cell]:.2f} ({base[cell] / times[cell]:.1f}x)" for cell in cells))
    return table


if __name__ == "__main__":
    main()
