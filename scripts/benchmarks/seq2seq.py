"""Encoder-decoders, side by side: this project through Triton's gRPC streams, other engines in their own processes.

Work: texts of 16 to 256 tokens (log-uniform, seed 0), answers of 48, past any end token, greedily and with 4 beams,
from `concurrency` clients that each send the next text when the last is answered; the other engines get groups of as
many. Real architecture sizes, random weights. One side at a time, equal threads, each warmed up. All answers are of
one length, so that no side computes tokens that do not count.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer
from tritonclient import grpc

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.common.machine import available_cores
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.serving.server.triton import running
from scripts.benchmarks import peers
from scripts.benchmarks.circumstances import circumstances, replace_figures
from scripts.benchmarks.generators import save_tokenizer

MAX_LENGTH, ANSWER = 256, 48
LARGE_BART = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
}
SMALL_MARIAN = {
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
}
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
WRITTEN = {
    "normalize_before": True,
    "normalize_embedding": True,
    "add_final_layer_norm": True,
}  # CTranslate2 reads them
SHARED = {"scale_embedding": True, "forced_eos_token_id": None}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5-small": ("t5", {"vocab_size": 32128}),
    "marian": ("marian", {**SMALL_MARIAN, "vocab_size": 58101, **SHARED, "pad_token_id": 58100}),
    "mbart-large-50": (
        "mbart",
        {**LARGE_BART, "vocab_size": 250054, **SHARED, **WRITTEN},
    ),
}
OURS = ("int8", "int8-weights", "fp32")
PEERS = (
    ("transformers eager", "transformers_seq2seq_peer", "eager"),
    ("transformers dynamic int8", "transformers_seq2seq_peer", "dynamic-int8"),
    ("Optimum ONNX Runtime fp32", "optimum_seq2seq_peer", "fp32"),
    ("Optimum ONNX Runtime O3", "optimum_seq2seq_peer", "O3"),
    ("Optimum ONNX Runtime int8", "optimum_seq2seq_peer", "int8"),
    ("CTranslate2 int8", "ctranslate2_seq2seq_peer", "int8"),
)


@dataclass(frozen=True)
class WorkItem:
    """One request: its text, and its tokens."""

    text: str
    source: list[int]


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench seq2seq")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--beams", default="1,4")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--ours", default=",".join(OURS))
    parser.add_argument("--peers", default=",".join(name for name, _, _ in PEERS))
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where the peers are installed")
    parser.add_argument("--checkpoints", type=Path, help="keep checkpoints and conversions here")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    console = Console(width=130)
    others = peers.chosen(PEERS, options.peers)
    used = {title: peers.PACKAGES[peer] for title, peer, _ in others}
    figures: dict[str, Any] = {**circumstances(), "peers": used, "models": {}}
    failures: list[str] = []
    console.print(f"{figures['cores']} cores, {figures['cpu']}", highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        root = options.checkpoints or Path(folder)
        for name in options.models.split(","):
            figures["models"][name] = _bench_model(console, name, root / name, Path(folder), options, others, failures)
            replace_figures(options.output, figures)
    peers.fail_with(failures)


def make_checkpoint(name: str, folder: Path) -> Path:
    """Create a checkpoint of a real size with random weights, and a byte-level tokeniser with as many tokens."""
    if (folder / "model.safetensors").exists():
        return folder
    model_type, options = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SPECIAL, **options})
    config.decoder_start_token_id = config.pad_token_id
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder, max_shard_size="100GB")
    pad = "!" if config.pad_token_id == 0 else "<pad>"  # the first token of all, or one after all others
    save_tokenizer(folder, config.vocab_size, pad_token=pad, eos_token='"')
    return folder


def make_work(tokenizer: Any, count: int) -> list[WorkItem]:
    """Create `count` texts; any count gives the same texts first."""
    generator = np.random.default_rng(0)
    words = " ".join(TEXTS).split()
    work = []
    for _ in range(count):
        length = int(np.exp(generator.uniform(np.log(16), np.log(MAX_LENGTH))))
        start = int(generator.integers(0, len(words)))
        text = tokenizer.decode(tokenizer(" ".join((words[start:] + words + words)[:length]))["input_ids"][:length])
        work.append(WorkItem(text, tokenizer(text)["input_ids"]))
    return work


def _bench_model(
    console: Console,
    name: str,
    folder: Path,
    scratch: Path,
    options: argparse.Namespace,
    others: Sequence[tuple[str, str, str]],
    failures: list[str],
) -> dict[str, Any]:
    """Return the figures of all sides of one model; append the reason of each peer that cannot run to `failures`."""
    checkpoint = make_checkpoint(name, folder)
    concurrencies = [int(part) for part in options.concurrency.split(",")]
    widths = [int(part) for part in options.beams.split(",")]
    work = make_work(AutoTokenizer.from_pretrained(checkpoint), max(options.requests, 2 * max(concurrencies)))
    cells = [
        (beams, clients, work[: max(options.requests, 2 * clients)]) for beams in widths for clients in concurrencies
    ]
    sides: dict[str, dict[str, Any]] = {}
    for precision in filter(None, options.ours.split(",")):
        repository = scratch / f"{name}-{precision}"
        spec = make_spec(
            model=str(checkpoint),
            name="model",
            output=repository,
            precision=precision,
            max_length=MAX_LENGTH,
            max_answer=64,
            beams=max(widths),
            slots=max(widths) * max(concurrencies),
            quality=0.0,  # random weights have none to lose
            perplexity=1e9,
        )
        report = build(spec)
        title = f"ours {precision}"
        with running(repository, timeout_s=600) as server:
            load(server.url, work[:2], 1, max(widths))
            sides[title] = {
                f"{beams}/{clients}": load(server.url, requests, clients, beams) for beams, clients, requests in cells
            }
        sides[title]["megabytes"] = report.variants[-1].size / 1e6
        _show(console, name, title, sides)
    for title, peer, kind in others:
        documents = {f"{beams}/{clients}": work_document(mine, clients, beams) for beams, clients, mine in cells}
        run = documents, peer, options.environments, scratch, checkpoint, kind
        measured = peers.run_or_report(console, failures, f"{name}, {title}", *run)
        if measured is not None:
            sides[title] = measured
            _show(console, name, title, sides)
    console.print(_table(name, sides, [(beams, clients) for beams, clients, _ in cells]))
    return sides


def work_document(work: Sequence[WorkItem], concurrency: int, beams: int) -> dict[str, Any]:
    """Return the document that a peer reads."""
    return {
        "concurrency": concurrency,
        "beams": beams,
        "threads": available_cores(),
        "requests": [{"source": request.source, "new_tokens": ANSWER} for request in work],
    }


def load(url: str, work: Sequence[WorkItem], clients: int, beams: int) -> dict[str, Any]:
    """Run that many clients, each on its own stream; return the tokens per second and the median time of an answer."""
    times: list[float] = []

    def serve(mine: Sequence[WorkItem]) -> int:
        tokens = 0
        with grpc.InferenceServerClient(url) as client:
            arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
            client.start_stream(lambda result, error: arrived.put((result, error)))
            for request in mine:
                start = time.perf_counter()
                client.async_stream_infer("model", _inputs(request, beams))
                result, error = arrived.get()
                if error is not None:
                    raise error
                tokens += int(result.as_numpy("completion_tokens")[0])
                times.append(time.perf_counter() - start)
            client.stop_stream()
        return tokens

    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        tokens = sum(pool.map(serve, [work[client::clients] for client in range(clients)]))
        seconds = time.perf_counter() - start
    return {"tokens_per_s": tokens / seconds, "answer_ms": float(np.median(times)) * 1000}


def _inputs(request: WorkItem, beams: int) -> list[Any]:
    values = {
        "text_input": ("BYTES", np.array([request.text.encode()], np.object_)),
        "max_tokens": ("INT32", np.array([ANSWER], np.int32)),
        "ignore_eos": ("BOOL", np.array([True])),
        "num_beams": ("INT32", np.array([beams], np.int32)),
    }
    inputs = []
    for name, (kind, array) in values.items():
        inputs.append(grpc.InferInput(name, [1], kind))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def _show(console: Console, name: str, title: str, sides: dict[str, dict[str, Any]]) -> None:
    figures = {cell: value for cell, value in sides[title].items() if isinstance(value, dict)}
    text = ", ".join(f"{c}: {v['tokens_per_s']:.1f}" for c, v in figures.items())
    console.print(f"{name}, {title} (beams/clients): {text}", highlight=False)


def _table(name: str, sides: dict[str, dict[str, Any]], cells: Sequence[tuple[int, int]]) -> Table:
    table = Table(title=f"{name}: tokens/s", title_justify="left")
    table.add_column("")
    for beams, clients in cells:
        table.add_column(f"{'greedy' if beams == 1 else f'{beams} beams'}, {clients} clients", justify="right")
    for title, figures in sides.items():
        row = [figures.get(f"{beams}/{clients}", {}) for beams, clients in cells]
        table.add_row(title, *(f"{c['tokens_per_s']:.1f}" if "tokens_per_s" in c else "-" for c in row))
    return table


if __name__ == "__main__":
    main()
