"""Tables of decoders: those beside the machine's limit (generation-states*.json, step.json), and of lookups.json."""

from __future__ import annotations

from typing import Any

from scripts.documentation.markdown import table
from scripts.documentation.recorded import read, recorded
from scripts.documentation.retrieval import reason

FILES = ("generation-states", "generation-states-long", "generation-states-amd")
LIMIT = "limit of the machine"
OPERATORS = 4  # the slowest of a step, by name
TITLES = {
    "lfm2-700m": "LFM2-700M: short convolutions in 10 of 16 layers",
    "qwen3.5-0.8b": "Qwen3.5-0.8B, text alone: the gated delta rule in 18 of 24 layers",
    "granite-4-h-350m": "Granite-4.0-H-350M: Mamba 2 in 28 of 32 layers",
    "granite-moe-1b": "Granite-3.1-1B-A400M: 8 of 32 experts a token",
}


def states() -> str:
    """Return a table of each model on each processor: tokens a second by clients and context, and the limit's share."""
    return "\n\n".join(map(_states, FILES))


def _states(file: str) -> str:
    figures = read(file)
    contexts = sorted({int(at.partition("/")[2]) for sides in figures["models"].values() for at in sides[LIMIT]})
    command = f"scripts/bench generation --contexts {','.join(map(str, contexts))}"
    parts = [
        f"{recorded(command, file, figures, ', some cells at a time,')}. Tokens a second while all clients are being "
        "answered; in brackets, their share of the limit, tokens a second from the first request to the last token, "
        "and the median milliseconds to the first token.",
    ]
    parts += [_table(name, figures["models"][name]) for name in TITLES if name in figures["models"]]
    parts += [f"- {title}: {reason(why)}" for title, why in figures.get("refused", {}).items()]
    return "\n\n".join(parts)


def _table(name: str, sides: dict[str, Any]) -> str:
    limits = sides[LIMIT]
    cells = sorted(limits, key=lambda at: [int(part) for part in reversed(at.split("/"))])
    ordered = [*(title for title in sides if title != LIMIT), LIMIT]
    rows = ((title, *(_cell(sides[title].get(at), limits[at]) for at in cells)) for title in ordered)
    return f"{TITLES[name]}\n\n{table(('side', *map(_head, cells)), rows)}"


def _head(at: str) -> str:
    clients, context = at.split("/")
    return f"{clients} client{'s' * (clients != '1')}, {int(context):,} tokens"


def _cell(cell: dict[str, float] | None, limit: dict[str, float]) -> str:
    if not cell or "decode_tokens_per_s" not in cell:
        return "-"
    rate = cell["decode_tokens_per_s"]
    if "tokens_per_s" not in cell:
        return f"{rate:.0f} at {cell['bandwidth']:.1f} GB/s"
    share = cell.get("guessed_share", 0.0)
    guessed = f", {share:.0%} guessed" if share >= 0.005 else ""
    of_limit = f"{rate / limit['decode_tokens_per_s']:.0%}"
    return f"{rate:.1f} ({of_limit}, {cell['tokens_per_s']:.1f}, {cell['first_token_ms']:.0f}{guessed})"


def steps() -> str:
    """Return a table of each model: the milliseconds of a token beside the least, and the slowest operators."""
    figures = read("step")
    command = f"scripts/bench step --models {','.join(figures['models'])}"
    parts = [f"{recorded(command, 'step', figures)}, one token after {figures['context']}."]
    heads = (
        "",
        "read, MB",
        "GB/s",
        "limit, ms",
        "step, ms",
        "of the limit",
        "loop, ms",
        "of 2, 4, 8, 16 tokens, ms",
        "of 64, 72, 128, 136, 192, 200, 256, 264 tokens of a prompt, ms",
        "slowest operators, ms",
    )
    for name, sides in figures["models"].items():
        parts.append(f"{name}\n\n{table(heads, (_step(kind, side) for kind, side in sides.items()))}")
        rows = sides["openvino:int8"]["rows_ms"]
        cells = ((case, *(f"{ms:.1f}" for ms in both)) for case, both in rows.items())
        heads_of_rows = ("rows x tokens after 448, OpenVINO int8", "as rows of one token, ms", "as prompts, ms")
        parts.append(table(heads_of_rows, cells))
    return "\n\n".join(parts)


def lookups() -> str:
    """Return a table of the speed with guessed tokens, by text, rule and rows, in multiples of that without."""
    figures = read("lookups")
    rows: list[tuple[str, ...]] = []
    for kind, rules in figures["texts"].items():
        for rule, cells in rules.items():
            shown = (f"{one['speed']:.2f} ({one['guessed']:.0%}, {one['right']:.0%})" for one in cells.values())
            rows.append((kind, rule, *shown))
    heads = ("text", "rule", *(f"{count} row{'s' * (count != '1')}" for count in next(iter(rules.values()))))
    command = "scripts/bench lookups --output docs/lookups.json"
    return f"Counted by `{command}` ([figures](../lookups.json)).\n\n{table(heads, rows)}"


def _step(kind: str, side: dict[str, Any]) -> tuple[str, ...]:
    engine, _, weights = kind.rpartition(":")
    precision, _, block = weights.partition("@")
    title = f"{'OpenVINO' if engine else 'ONNX Runtime'} {precision}" + f", blocks of {block}" * bool(block)
    named = [entry for entry in side["operators"] if entry[0] != "others"][:OPERATORS]
    return (
        title,
        f"{side['weights_mb'] + side['cache_mb']:.0f}",
        f"{side['bandwidth_gb_s']:.1f}",
        *(f"{side[key]:.1f}" for key in ("limit_ms", "step_ms")),
        f"{side['limit_ms'] / side['step_ms']:.0%}",
        f"{side['loop_ms']:.2f}",
        ", ".join(f"{ms:.1f}" for ms in side["tokens_ms"].values()),
        ", ".join(f"{ms:.0f}" for ms in side["pieces_ms"].values()),
        ", ".join(f"{operator} {ms:.1f}" for operator, ms in named),
    )
