"""Text generation, side by side: this project through Triton's gRPC streams, other engines in their own processes.

Work: prompts and answers of the lengths in WORKS (log-uniform, seed 0), greedy, past any end token, from
`concurrency` clients that each send the next request when the last is answered. Real architecture sizes, random
weights. One side at a time, equal threads, each warmed up. Tokens per second count the tokens that requests asked for;
the times to the first token and from token to token are medians over requests. Random weights soon repeat themselves,
which flatters guessing by prompt lookup: for our sides, the share of guessed tokens is recorded. A draft is the first
layers of the model, because nothing smaller is nearer to a model with random weights. The share of its guesses that
were right is recorded too, because it is not that of a trained draft.
"""

from __future__ import annotations

import argparse
import json
import queue
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.building.pipeline import build
from builder.building.variants.encoder import measurements_of
from builder.checkpoints.libraries import quiet_libraries
from builder.common.machine import available_cores
from builder.options import make_spec
from builder.serving.server.triton import TritonServer, running
from scripts.benchmarks import peers
from scripts.benchmarks.circumstances import circumstances, refuse_other, write_figures
from scripts.benchmarks.decode_limits import cached_layers, decode_limit
from scripts.benchmarks.generation_work import WORKS, Cell, WorkItem, make_cells
from scripts.benchmarks.generators import first_layers, make_checkpoint
from scripts.benchmarks.machine_limits import machine_limits
from scripts.benchmarks.peers.clock import Clock
from scripts.benchmarks.traffic import counters

WARM_UP = 2000  # characters of a prompt
LIMIT = "limit of the machine"
CONTEXT_SLOTS, CONTEXT_LENGTH = 16, 8448  # of a build for --contexts, at least: all of them are runs of one build
OURS = (
    "int8", "int8/int8", "int4-weights", "int4-weights@128", "fp32",
    "openvino:int8/int8", "openvino:int4-weights@128/int8",
)  # fmt: skip
PEERS = (
    ("openvino-genai int8", "openvino_genai_peer", "int8"),
    ("openvino-genai int4", "openvino_genai_peer", "int4"),
    ("llama.cpp Q8_0", "llama_cpp_peer", "Q8_0"),
    ("llama.cpp Q4_0", "llama_cpp_peer", "Q4_0"),
    ("CTranslate2 int8", "ctranslate2_peer", "int8"),
    ("onnxruntime-genai int4", "genai_peer", "int4"),
    ("transformers generate", "transformers_peer", "cache"),
    ("transformers generate without cache", "transformers_peer", "no-cache"),
)


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench generation")
    parser.add_argument("--models", default="gpt2")
    parser.add_argument("--work", default="mixed", choices=WORKS, help="how long prompts and answers are")
    parser.add_argument("--contexts", help="instead of --work: prompts of so many tokens, one request from each client")
    parser.add_argument("--concurrency", "--clients", default="1,4,8,16")
    parser.add_argument("--rounds", type=int, default=1, help="of all sides; figures are medians over them")
    parser.add_argument("--requests", type=int, default=8, help="at least; more with more clients")
    parser.add_argument("--per-client", type=int, default=3)
    parser.add_argument("--ours", default=",".join(OURS), help="[openvino:]PRECISION[@BLOCK SIZE][/CACHE][+LAYERS]")
    parser.add_argument("--peers", default=",".join(name for name, _, _ in PEERS))
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where the peers are installed")
    parser.add_argument("--checkpoints", type=Path, help="keep checkpoints, conversions and repositories here")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON; those of other sides stay")
    options = parser.parse_args()
    work_name = "contexts" if options.contexts else options.work
    machine = circumstances()
    refuse_other(options.output, work=work_name)
    if options.contexts:
        refuse_other(options.output, cpu=machine["cpu"], cores=machine["cores"], versions=machine["versions"])
    console = Console(width=130)
    others = peers.chosen(PEERS, options.peers)
    used = {title: peers.PACKAGES[peer] for title, peer, _ in others}
    figures: dict[str, Any] = {**machine, "peers": used, "work": work_name, "models": {}}
    failures: list[str] = []
    console.print(f"{figures['cores']} cores, {figures['cpu']}", highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        root = options.checkpoints or Path(folder)
        for name in options.models.split(","):
            figures["models"][name] = _bench_model(console, name, root / name, Path(folder), options, others, failures)
            if options.contexts:
                figures["refused"] = dict(failure.split(": ", 1) for failure in failures)
            if options.output:
                write_figures(options.output, figures)
    peers.fail_with(failures)


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
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    cells = make_cells(tokenizer, AutoConfig.from_pretrained(checkpoint).max_position_embeddings, options)
    own = {
        title: _built(checkpoint, folder if options.checkpoints else scratch / name, wanted)
        for title, wanted in map(partial(_own_side, cells), filter(None, options.ours.split(",")))
    }
    rounds: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for title, repository in own.items():
            with running(repository, timeout_s=600) as server:
                first = next(iter(cells.values())).work[0]
                load(server.url, 2 * [WorkItem(first.text[:WARM_UP], [], 8)], 1)
                rounds.setdefault(title, []).append({at: _counted(server, cell) for at, cell in cells.items()})
            _show(console, name, title, rounds[title][-1])
        for title, peer, kind in others:
            documents = {
                at: _work_document(cell, 3 if kind == "no-cache" else None)
                for at, cell in cells.items()
                if kind != "no-cache" or cell.clients == 1
            }
            run = documents, peer, options.environments, scratch, checkpoint, kind
            measured = peers.run_or_report(console, failures, f"{name}, {title}", *run)
            if measured is not None:
                check_counts(title, documents, measured)
                rounds.setdefault(title, []).append(measured)
                _show(console, name, title, measured)
    sides: dict[str, dict[str, Any]] = {title: medians(each) for title, each in rounds.items()}
    for title, repository in own.items():
        record = json.loads((repository / "model" / "build.json").read_text())
        sides[title]["megabytes"] = record["ladder"][-1]["size"] / 1e6
    if options.contexts and own:
        sides[LIMIT] = _limits(checkpoint, next(iter(own.values())), cells)
        _show(console, name, LIMIT, sides[LIMIT])
    console.print(_table(name, sides, list(cells)))
    return sides


def _own_side(cells: Mapping[str, Cell], kind: str) -> tuple[str, dict[str, Any]]:
    """Return the title and the options of the build of one of `--ours`."""
    engine, _, rest = kind.rpartition(":")
    rest, _, layers = rest.partition("+")
    weights, _, cache = rest.partition("/")
    precision, _, block = weights.partition("@")
    title = (
        f"ours {'OpenVINO ' * bool(engine)}{precision}"
        + (f", blocks of {block}" if block else "")
        + (f", {cache} cache" if cache else "")
        + (f", draft of {layers} layers" if layers else "")
    )
    by_context = any(cell.context for cell in cells.values())
    return title, {
        "engine": engine or None,
        "precision": precision,
        "cache": cache or "fp32",
        "block_size": int(block or 32),
        "max_length": max([*(cell.longest for cell in cells.values()), CONTEXT_LENGTH * by_context]),
        "slots": max([*(cell.clients for cell in cells.values()), CONTEXT_SLOTS * by_context]),
        "draft": layers or None,
        "quality": 0.0,  # random weights have none to lose
        "perplexity": 1e9,
    }


def _built(checkpoint: Path, folder: Path, wanted: dict[str, Any]) -> Path:
    """Return the repository of a side, built and verified at its first use."""
    if wanted["draft"]:
        wanted = {**wanted, "draft": str(first_layers(checkpoint, int(wanted["draft"])))}
    repository = folder / f"ours-{_key(wanted)}"
    if not repository.exists():
        build(make_spec(model=str(checkpoint), name="model", output=repository, **wanted))
    return repository


def _limits(checkpoint: Path, repository: Path, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """Return the machine's limits by cell, with the bandwidth that was measured for them, in 10^9 bytes a second."""
    machine, layers = machine_limits(), cached_layers(repository)
    return {
        at: {
            "decode_tokens_per_s": decode_limit(checkpoint, layers, cell.clients, cell.context, machine),
            "bandwidth": machine["bandwidth"],
        }
        for at, cell in cells.items()
    }


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over rounds of the numbers of each cell."""
    return {
        at: {
            key: median(each[at][key] for each in rounds) if isinstance(value, int | float) else value
            for key, value in cell.items()
            if all(key in each[at] for each in rounds)
        }
        for at, cell in rounds[0].items()
    }


def check_counts(title: str, documents: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Raise SystemExit if a side answered another number of tokens than `documents` of work ask for."""
    for at, figures in measured.items():
        asked = sum(request["new_tokens"] for request in documents[at]["requests"])
        if figures.get("tokens", asked) != asked:
            raise SystemExit(f"{title}, {at}: {figures['tokens']} tokens came, and {asked} were asked for")


def _key(figures: dict[str, Any]) -> str:
    """Return the name of a cached repository: it differs for other options or another version of this project."""
    path = measurements_of(figures).path
    assert path is not None
    return path.stem[:12]


def _work_document(cell: Cell, most: int | None) -> dict[str, Any]:
    return {
        "concurrency": cell.clients,
        "threads": available_cores(),
        "max_length": cell.longest,
        "requests": [{"prompt": item.prompt, "new_tokens": item.new_tokens} for item in cell.work[:most]],
    }


def _counted(server: TritonServer, cell: Cell) -> dict[str, float]:
    """Return the figures of `load`, the shares of tokens guessed by lookup and draft, and the draft's acceptance."""
    before = counters(server)
    figures = load(server.url, cell.work, cell.clients)
    check_counts("ours", {"": _work_document(cell, None)}, {"": figures})
    time.sleep(1.5)  # counters are sent once a second
    after, tokens = counters(server), figures["tokens"]
    names = ("right_guesses", "drafted_tokens", "right_drafts")
    totals = [f"build_repo_{name}_total" for name in names]
    guessed, drafted, right = (after.get(total, 0.0) - before.get(total, 0.0) for total in totals)
    shares = {"guessed_share": guessed / tokens}
    if drafted:
        shares |= {"drafted_share": right / tokens, "draft_acceptance": right / drafted}
    return {**figures, **shares}


def load(url: str, work: Sequence[WorkItem], concurrency: int) -> dict[str, float]:
    """Run clients over one gRPC stream; return the figures of `Clock`."""
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting = list(enumerate(work))

    def send() -> None:
        index, item = waiting.pop(0)
        clock.send(str(index))
        outgoing.put(_request(str(index), item))

    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        clock = Clock()
        for _ in range(min(concurrency, len(waiting))):
            send()
        left = len(work)
        for message in stub.ModelStreamInfer(iter(outgoing.get, None)):
            if message.error_message:
                raise RuntimeError(message.error_message)
            response = message.infer_response
            names = [output.name for output in response.outputs]
            raw = response.raw_output_contents[names.index("num_output_tokens")]
            clock.tokens(response.id, int(np.frombuffer(raw, np.uint32)[0]))
            if "completion_tokens" in names:
                left -= 1
                if waiting:
                    send()
                if not left:
                    break
        outgoing.put(None)
    return clock.figures()


def _request(identity: str, item: WorkItem) -> Any:
    request = service_pb2.ModelInferRequest(model_name="model", id=identity)
    text = item.text.encode()
    values = (
        ("text_input", "BYTES", len(text).to_bytes(4, "little") + text),
        ("max_tokens", "INT32", np.int32(item.new_tokens).tobytes()),
        ("ignore_eos", "BOOL", b"\x01"),
        ("stream", "BOOL", b"\x01"),
        ("return_num_output_tokens", "BOOL", b"\x01"),
    )
    for name, kind, raw in values:
        request.inputs.add(name=name, datatype=kind, shape=[1])
        request.raw_input_contents.append(raw)
    return request


def _show(console: Console, name: str, title: str, cells: Mapping[str, Any]) -> None:
    console.print(f"{name}, {title}: {', '.join(f'{at}: {_cell(v)}' for at, v in cells.items())}", highlight=False)


def _table(name: str, sides: dict[str, dict[str, Any]], cells: Sequence[str]) -> Table:
    title = f"{name}: tokens/s (median ms to the first token, and from token to token)"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for at in cells:
        clients, _, context = at.partition("/")
        table.add_column(f"{clients} clients" + f", {context} tokens" * bool(context), justify="right")
    for title, figures in sides.items():
        table.add_row(title, *(_cell(figures[at]) if at in figures else "-" for at in cells))
    return table


def _cell(figures: dict[str, float]) -> str:
    guessed, drafted = figures.get("guessed_share", 0.0), figures.get("drafted_share", 0.0)
    together = f"{figures['decode_tokens_per_s']:.1f} at once" if "decode_tokens_per_s" in figures else ""
    if "tokens_per_s" not in figures:
        return together
    return (
        f"{figures['tokens_per_s']:.1f} ({figures['first_token_ms']:.0f}, {figures['inter_token_ms']:.1f})"
        + (f", {together}" if together else "")
        + (f", {guessed:.0%} guessed" if guessed else "")
        + (f", {drafted:.0%} drafted of {figures['draft_acceptance']:.0%} right" if drafted else "")
    )


if __name__ == "__main__":
    main()
