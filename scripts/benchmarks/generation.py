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
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from builder.checkpoints.libraries import quiet_libraries
from builder.common.machine import available_cores
from builder.serving.server.triton import TritonServer, running
from scripts.benchmarks import peers
from scripts.benchmarks.circumstances import circumstances, refuse_other, refuse_other_machine, write_figures
from scripts.benchmarks.decode_limits import cached_layers, decode_limit
from scripts.benchmarks.generation_builds import built, own_side
from scripts.benchmarks.generation_work import WORKS, Cell, WorkItem, make_cells
from scripts.benchmarks.generators import make_checkpoint
from scripts.benchmarks.machine_limits import machine_limits
from scripts.benchmarks.token_streams import load
from scripts.benchmarks.traffic import counters

WARM_UP = 2000  # characters of a prompt
AHEAD = "Warm up. "  # of them: no request begins so, whose beginning would be reused
MOST_REUSED = 0.02  # of the tokens of prompts: two may begin with the same few
LIMIT = "limit of the machine"
OURS = (
    "int8", "int8/int8", "int4-weights", "int4-weights@128", "fp32",
    "openvino:int8/int8", "openvino:int4-weights@128/int8",
)  # fmt: skip
PEERS = (
    ("openvino-genai int8", "openvino_genai_peer", "int8"),
    ("openvino-genai int8 guessing", "openvino_genai_peer", "int8-lookup"),
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
    parser.add_argument("--rounds", type=int, default=1, help="of all sides, for medians; 0 builds only")
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
        refuse_other_machine(options.output, machine)
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
        title: built(checkpoint, folder if options.checkpoints else scratch / name, wanted)
        for title, wanted in map(partial(own_side, cells), filter(None, options.ours.split(",")))
    }
    if not options.rounds:
        return {}
    rounds: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for title, repository in own.items():
            rounds.setdefault(title, []).append({at: _served(repository, cell) for at, cell in cells.items()})
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


def _work_document(cell: Cell, most: int | None) -> dict[str, Any]:
    return {
        "concurrency": cell.clients,
        "threads": available_cores(),
        "max_length": cell.longest,
        "requests": [{"prompt": item.prompt, "new_tokens": item.new_tokens} for item in cell.work[:most]],
    }


def _served(repository: Path, cell: Cell) -> dict[str, float]:
    """Return the figures of `_counted` of a new server: cells share prompts, which another's cache would know."""
    with running(repository, timeout_s=600) as server:
        load(server.url, 2 * [WorkItem(AHEAD + cell.work[0].text[:WARM_UP], [], 8)], 1)
        return _counted(server, cell)


def _counted(server: TritonServer, cell: Cell) -> dict[str, float]:
    """Return the figures of `load`, the shares of tokens guessed by lookup and draft, and the draft's acceptance.

    Raises SystemExit if prompts were read from the cache: no request of a cell begins as another does.
    """
    before = _settled_counters(server)
    figures = load(server.url, cell.work, cell.clients)
    check_counts("ours", {"": _work_document(cell, None)}, {"": figures})
    after, tokens = _settled_counters(server), figures["tokens"]
    names = ("right_guesses", "drafted_tokens", "right_drafts")
    totals = [f"build_repo_{name}_total" for name in names]
    reused = after.get("build_repo_reused_tokens_total", 0.0) - before.get("build_repo_reused_tokens_total", 0.0)
    if reused > MOST_REUSED * sum(len(item.prompt) for item in cell.work):
        raise SystemExit(f"{reused:.0f} tokens of prompts were in the cache already: each has to be read")
    guessed, drafted, right = (after.get(total, 0.0) - before.get(total, 0.0) for total in totals)
    shares = {"guessed_share": guessed / tokens}
    if drafted:
        shares |= {"drafted_share": right / tokens, "draft_acceptance": right / drafted}
    return {**figures, **shares}


def _settled_counters(server: TritonServer) -> dict[str, float]:
    time.sleep(1.5)  # they are sent once a second
    return counters(server)


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
