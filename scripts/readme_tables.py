"""The README's tables, from the code and from recorded figures; a test keeps them true."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from builder.runtime.fields import Field
from builder.tasks import all_tasks
from tests.checkpoints import ARCHITECTURES

ROOT = Path(__file__).parent.parent
PARAMETERS: dict[str, Any] = {"prompts": {}, "pooled": True, "size": "size"}


def tasks() -> str:
    """Each task with the tensors of its front model; optional ones in italics."""
    lines = ["| task | inputs | outputs |", "|---|---|---|"]
    for task in all_tasks().values():
        inputs, outputs = task.fields(PARAMETERS)
        lines.append(f"| {task.name} | {_fields(inputs)} | {_fields(outputs)} |")
    return "\n".join(lines)


def _fields(fields: tuple[Field, ...]) -> str:
    described = []
    for field in fields:
        dims = "" if field.dims == (1,) else f"[{', '.join('n' if d == -1 else str(d) for d in field.dims)}]"
        text = f"{field.name} {field.data_type.removeprefix('TYPE_')}{dims}"
        described.append(f"*{text}*" if field.optional else text)
    return ", ".join(described)


def architectures() -> str:
    """Each tested model type with how its attention is exported."""
    lines = ["| model type | attention | note |", "|---|---|---|"]
    for name, architecture in ARCHITECTURES.items():
        fused = "fused" if architecture.fused else "separate operators"
        lines.append(f"| {name} | {fused} | {architecture.note} |")
    return "\n".join(lines)


def encoders() -> str:
    """The figures that `scripts/bench encoders --output docs/encoders.json` recorded."""
    figures = json.loads((ROOT / "docs" / "encoders.json").read_text("utf-8"))
    lines = [
        f"Texts a second through the server, {figures['cores']} cores of an {figures['cpu']}:",
        "",
        "| model | side | 1 client | 8 clients | 32 clients | p99 at 32, ms | padding at 32 |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, result in figures.items():
        if model in ("cores", "cpu"):
            continue
        base = result["served"]["FastAPI + pipeline"]
        for side, rows in result["served"].items():
            cells = [f"{rows[c]['requests_per_s']:.0f} ({_ratio(rows[c], base[c])}x)" for c in ("1", "8", "32")]
            last = rows["32"]
            lines.append(
                f"| {model} | {side} | {' | '.join(cells)} | {last['p99_ms']:.0f} | {100 * last['padding']:.1f}% |"
            )
    return "\n".join(lines)


def _ratio(row: dict[str, float], base: dict[str, float]) -> str:
    return f"{row['requests_per_s'] / base['requests_per_s']:.1f}"


TABLES = {"tasks": tasks, "architectures": architectures, "encoders": encoders}


def rendered(text: str) -> str:
    """`text` with what stands between `<!-- NAME -->` and `<!-- /NAME -->` made anew."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no place for the table {name!r}: <!-- {name} --> ... <!-- /{name} -->")
        content = table()
        text = pattern.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
    return text


def main() -> None:
    readme = ROOT / "README.md"
    before = readme.read_text("utf-8")
    after = rendered(before)
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if before == after else "README.md is out of date: run scripts/docs")
    readme.write_text(after, "utf-8")


if __name__ == "__main__":
    main()
