"""Tables of the figures that `scripts/bench` recorded in docs/*.json."""

from __future__ import annotations

from typing import Any

from scripts.documentation.markdown import table
from scripts.documentation.recorded import read, recorded

FASTEST_PEER = "generation-openvino"  # the run of text generation beside the fastest peer that was found
OURS = "ours OpenVINO int8, int8 cache"  # as many bits as the peer has


def results() -> str:
    """Return the README's one table: this project beside the tools it replaces, one row per kind of model."""
    encoders, generation, seq2seq = (read(name) for name in ("encoders", FASTEST_PEER, "seq2seq"))
    rows = [
        *(
            _result(
                "MiniLM embeddings, 32 clients",
                "texts/s",
                (peer, encoders["minilm"]["served"][side]["32"]["requests_per_s"]),
                ("int8", encoders["minilm"]["served"]["int8, 2 x 1 threads"]["32"]["requests_per_s"]),
            )
            for peer, side in (
                ("FastAPI + transformers, fp32", "FastAPI + pipeline"),
                ("infinity, PyTorch", "infinity torch"),
            )
        ),
        *(
            _beside_fastest(f"{title} generation, {clients} client{'s' * (clients > 1)}", sides, str(clients))
            for title, sides in (
                ("GPT-2", generation["models"]["gpt2"]),
                ("Qwen3-0.6B", generation["models"]["qwen3-0.6b"]),
            )
            for clients in (1, 8)
        ),
        *(
            _result(
                f"{title}, 4 beams, 8 clients",
                "tokens/s",
                (peer, seq2seq["models"][model][peer]["4/8"]["tokens_per_s"]),
                ("int8", seq2seq["models"][model]["ours int8"]["4/8"]["tokens_per_s"]),
            )
            for title, model in (("T5-small", "t5-small"), ("mBART-large-50", "mbart-large-50"))
            for peer in ("CTranslate2 int8",)
        ),
    ]
    return table(("served through Triton", "compared with", "there", "here", "ratio"), rows)


def _beside_fastest(subject: str, sides: dict[str, dict[str, Any]], clients: str) -> tuple[str, ...]:
    """Return the row of one model and number of clients, beside the fastest side of the peer."""
    peers = {name: cells[clients]["tokens_per_s"] for name, cells in sides.items() if not name.startswith("ours")}
    fastest, own = max(peers, key=lambda name: peers[name]), sides[OURS][clients]
    how = ", ".join(["int8", *_guessed(own)])
    return _result(subject, "tokens/s", (fastest, peers[fastest]), (how, own["tokens_per_s"]))


def _result(subject: str, unit: str, peer: tuple[str, float], here: tuple[str, float]) -> tuple[str, ...]:
    there = f"{peer[1]:.0f} {unit}"
    return subject, peer[0], there, f"{here[1]:.0f} {unit} ({here[0]})", f"{here[1] / peer[1]:.1f}x"


def encoders() -> str:
    """Return the texts a second through servers, side by side."""
    figures = read("encoders")
    rows = []
    for model, result in figures.items():
        if not isinstance(result, dict) or "served" not in result:
            continue
        base = result["served"]["FastAPI + pipeline"]
        for side, cells in result["served"].items():
            speeds = [_times(cells[c]["requests_per_s"], base[c]["requests_per_s"]) for c in ("1", "8", "32")]
            rows.append((model, side, *speeds, f"{cells['32']['p99_ms']:.0f}", f"{100 * cells['32']['padding']:.1f}%"))
    heads = ("model", "side", "1 client", "8 clients", "32 clients", "p99 at 32, ms", "padding at 32")
    ran = recorded("scripts/bench encoders", "encoders", figures)
    served = f"{ran}. Texts a second; in brackets, times FastAPI.\n\n{table(heads, rows)}"
    return "\n\n".join([served, *_in_process(figures)])


def _in_process(figures: dict[str, Any]) -> list[str]:
    """Return a table of the emitted code without a server and what a server adds to it, if that was measured."""
    rows = []
    for model, result in figures.items():
        for side, cell in result.get("in_process", {}).items() if isinstance(result, dict) else ():
            best = [
                rates["32"]["requests_per_s"]
                for name, rates in result["served"].items()
                if name.startswith(f"{side}, ")
            ]
            share = f"{100 * max(best) / cell['batched_per_s']:.0f}%" if best else "-"
            doors = cell.get("added_ms", {})
            added = [f"{doors[door]:.1f}" if door in doors else "-" for door in ("HTTP", "gRPC")]
            rows.append((model, side, f"{cell['alone_ms']:.1f}", *added, f"{cell['batched_per_s']:.0f}", share))
    heads = ("model, in process", "side", "a text alone, ms", "HTTP adds", "gRPC adds", "texts/s", "served at 32")
    return [table(heads, rows)] if rows else []


def _times(speed: float, base: float | None) -> str:
    return f"{speed:.0f}" if base is None else f"{speed:.0f} ({speed / base:.1f}x)"


def generation(name: str, options: str = "") -> str:
    """Return the tokens a second of decoders, beside other engines; `options`: of the run that recorded NAME.json."""
    figures = read(name)
    between = ", and from token to token" if "date" in figures else ""
    unit = f"Tokens a second; in brackets, median milliseconds to the first token{between}."
    parts = [f"{recorded(f'scripts/bench generation{options}', name, figures)}. {unit}"]
    for model, sides in figures["models"].items():
        counts = sorted({int(count) for side in sides.values() for count in side if count.isdigit()})
        heads = (model, *(f"{count} client{'s' * (count > 1)}" for count in counts))
        rows = ((title, *(_first(side.get(str(count), {})) for count in counts)) for title, side in sides.items())
        parts.append(table(heads, rows))
    return "\n\n".join(parts)


def _first(cell: dict[str, float]) -> str:
    if "tokens_per_s" not in cell:
        return "-"
    times = [
        f"{cell[name]:.{digits}f}" for name, digits in (("first_token_ms", 0), ("inter_token_ms", 1)) if name in cell
    ]
    return f"{cell['tokens_per_s']:.0f} ({', '.join([*times, *_guessed(cell)])})"


def _guessed(cell: dict[str, float]) -> list[str]:
    """Return the shares of tokens that were guessed ahead, in words, without those below half a percent."""
    shares = [(cell.get(f"{word}_share", 0.0), word) for word in ("guessed", "drafted")]
    return [f"{share:.0%} {word}" for share, word in shares if share >= 0.005]


def seq2seq() -> str:
    """Return the tokens a second of encoder-decoders, beside other engines."""
    figures = read("seq2seq")
    ran = recorded("scripts/bench seq2seq", "seq2seq", figures)
    parts = [f"{ran}. Tokens a second; in brackets, times transformers eager."]
    for model, sides in figures["models"].items():
        cells = list(dict.fromkeys(cell for side in sides.values() for cell in side if "/" in cell))
        base = sides["transformers eager"]
        rows = ((title, *(_cell(side.get(c, {}), base.get(c, {})) for c in cells)) for title, side in sides.items())
        parts.append(table((model, *(_search(cell) for cell in cells)), rows))
    return "\n\n".join(parts)


def _search(cell: str) -> str:
    beams, clients = cell.split("/")
    return f"{'greedy' if beams == '1' else f'{beams} beams'}, {clients} client{'s' * (clients != '1')}"


def _cell(cell: dict[str, float], base: dict[str, float]) -> str:
    return _times(cell["tokens_per_s"], base.get("tokens_per_s")) if "tokens_per_s" in cell else "-"


def soak() -> str:
    """Return the outcome of a soak test with kills, floods and publishes, and the memory by minute."""
    f = read("soak")
    disturbed = " ".join(f"--{plural} {f[kind]}" for kind, plural in DISTURBANCES)
    command = f"scripts/bench soak --minutes {f['minutes']:g} --clients {f['clients']} {disturbed}"
    sides = zip(
        f["megabytes_of_triton_by_minute"],
        f["megabytes_of_each_process_by_minute"],
        f["megabytes_of_shared_memory_by_minute"],
        strict=True,
    )
    minutes = list(enumerate(sides))
    shown = [row for row in minutes if row[0] % 4 == 1 or row == minutes[-1]]
    rows = [
        (str(minute), f"{own:.0f}", str(len(each)), f"{sum(each):.0f}", f"{shm:.1f}")
        for minute, (own, each, shm) in shown
    ]
    lost = f["running_at_the_end"] + f["waiting_at_the_end"]
    return (
        f"{recorded(command, 'soak', f)}: {f['streamed']:,} streams and {f['whole']:,} whole answers, {f['left']:,} "
        f"clients that disconnected early, {f['bad']:,} bad requests. {f['cut_by_a_kill_or_a_flood']:,} requests were "
        f"cut by a kill or refused in a flood, and {f['refused_in_a_flood']:,} of the floods themselves. "
        f"Wrong answers, and failures without one of these reasons: {len(f['wrong'])}. Slots lost: {lost:.0f}. "
        "The model answered again "
        f"{', '.join(map(str, f['back_after_s']))} s after it was killed.\n\n"
        + table(("minute", "Triton, MB", "processes of the model", "together, MB", "shared memory, MB"), rows)
    )


DISTURBANCES = (("kill", "kills"), ("flood", "floods"), ("publish", "publishes"))


def fleet_builds() -> str:
    """Return many builds: cold, with nothing changed and with one option changed, by executor."""
    f = read("fleet")
    names = {"process": "one process", "workers": "a worker for each core", "ray": "Ray, on this machine"}
    phases = list(next(iter(f["builds"].values())))
    rows = [(names[name], *map(_build_cell, of.values())) for name, of in f["builds"].items()]
    command = f"scripts/bench fleet builds --models {f['models']} --executors {','.join(f['builds'])}"
    return (
        f"{recorded(command, 'fleet', f)}: {f['models']} tiny models; the seconds of the whole command, in brackets "
        f"those of the processor, and the memory of all its processes.\n\n{table(('', *phases), rows)}"
    )


def _build_cell(run: dict[str, float]) -> str:
    return f"{run['seconds']:.1f} s ({run['processor_s']:.0f} s), {run['memory_mb']:,} MB"


def post(key: str) -> str:
    """Return one table of `scripts/bench posts`."""
    figures = read("posts")["posts"][key]
    rows = []
    for row in figures["rows"]:
        gain = "" if row["ratio"] is None else f"{row['ratio']:.1f}x"
        rows.append((row["technique"], row["value"], gain, row["claim"]))
    return f"{figures['title']}:\n\n{table(('technique', 'here', 'gain', 'the post says'), rows)}"


def posts_machine() -> str:
    """Return the command and the machine of the posts' techniques."""
    return f"{recorded('scripts/bench posts', 'posts', read('posts'))}."
