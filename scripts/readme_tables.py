"""The README's tables, from the code and from recorded figures; a test keeps them true."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from builder.engines.releases import RELEASES
from builder.runtime.fields import Field
from builder.tasks import all_tasks
from tests.checkpoints import ARCHITECTURES
from tests.decoders import DECODERS
from tests.seq2seqs import SEQ2SEQS

ROOT = Path(__file__).parent.parent
PARAMETERS: dict[str, Any] = {"prompts": {}, "pooled": True, "size": "size", "languages": True}


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


def releases() -> str:
    """What each Triton release carries."""
    lines = [
        "| Triton | ONNX Runtime | opset, IR | TensorRT | CUDA | OpenVINO | vLLM | Python |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in RELEASES.items():
        known = " | ".join(value or "" for value in (r.tensorrt, r.cuda, r.openvino, r.vllm, r.python))
        lines.append(f"| {name} | {r.onnxruntime} | {r.opset}, {r.ir_version} | {known} |")
    return "\n".join(lines)


def decoders() -> str:
    """Each tested decoder."""
    lines = ["| model type | note |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {decoder.note} |" for name, decoder in DECODERS.items())])


def seq2seqs() -> str:
    """Each tested encoder-decoder."""
    lines = ["| model type | note |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {model.note} |" for name, model in SEQ2SEQS.items())])


def seq2seq() -> str:
    """The figures that `scripts/bench seq2seq --output docs/seq2seq.json` recorded."""
    figures = json.loads((ROOT / "docs" / "seq2seq.json").read_text("utf-8"))
    lines = [
        f"Tokens a second, {figures['cores']} cores of an {figures['cpu']}; in brackets, times transformers eager:"
    ]
    for model, sides in figures["models"].items():
        cells = list(dict.fromkeys(cell for side in sides.values() for cell in side if "/" in cell))
        heads = [f"{'greedy' if c[0] == '1' else f'{c[0]} beams'}, {c[2:]} client{'s' * (c[2:] != '1')}" for c in cells]
        lines += ["", f"| {model} | {' | '.join(heads)} |", "|---" * (len(cells) + 1) + "|"]
        base = sides["transformers eager"]
        for title, side in sides.items():
            lines.append(f"| {title} | {' | '.join(_times(side.get(c, {}), base.get(c, {})) for c in cells)} |")
    return "\n".join(lines)


def _times(cell: dict[str, float], base: dict[str, float]) -> str:
    if "tokens_per_s" not in cell:
        return "-"
    speed = cell["tokens_per_s"]
    return f"{speed:.0f} ({speed / base['tokens_per_s']:.1f}x)" if "tokens_per_s" in base else f"{speed:.0f}"


def generation() -> str:
    """The figures that `scripts/bench generation --output docs/generation.json` recorded."""
    figures = json.loads((ROOT / "docs" / "generation.json").read_text("utf-8"))
    lines = [
        f"Tokens a second (median milliseconds to the first token), {figures['cores']} cores of an {figures['cpu']}:"
    ]
    for model, sides in figures["models"].items():
        counts = sorted({int(count) for side in sides.values() for count in side if count.isdigit()})
        lines += ["", f"| {model} | " + " | ".join(f"{count} client{'s' * (count > 1)}" for count in counts) + " |"]
        lines.append("|---" * (len(counts) + 1) + "|")
        for title, side in sides.items():
            cells = [_speed(side.get(str(count), {})) for count in counts]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _speed(cell: dict[str, float]) -> str:
    return f"{cell['tokens_per_s']:.0f} ({cell['first_token_ms']:.0f})" if "tokens_per_s" in cell else "-"


def decoding() -> str:
    """The figures that `scripts/bench decoding --output docs/decoding.json` recorded."""
    figures = json.loads((ROOT / "docs" / "decoding.json").read_text("utf-8"))
    lines = ["| tokens in the cache | session.run with numpy | I/O binding, a new cache each step | in place |"]
    lines.append("|---|---|---|---|")
    designs = ("numpy", "binding", "in place")
    for row in figures["cache"]:
        cells = [f"{row[d]['bytes'] / 1e6:.2f} MB, {row[d]['ms']:.1f} ms" for d in designs]
        lines.append(f"| {row['context']} | {' | '.join(cells)} |")
    longest = figures["cache"][-1]
    most = max(longest[design]["ms"] for design in designs)
    lines += ["", "```", f"milliseconds a step after {longest['context']} tokens"]
    lines += [f"{d:9}{'█' * round(40 * longest[d]['ms'] / most)} {longest[d]['ms']:.1f}" for d in designs]
    lines.append("```")
    limits = figures["limits"]
    lines += [
        "",
        f"At one row a step of int8 takes {limits['step_1_ms']:.1f} ms; reading its weights once at the measured "
        f"{limits['bandwidth_gb_s']:.0f} GB/s would take {limits['limit_1_ms']:.1f}. At 16 rows it takes "
        f"{limits['step_16_ms']:.1f} ms; its products at the measured {limits['int8_gop_s']:.0f} GOP/s would take "
        f"{limits['limit_16_ms']:.1f}.",
    ]
    lines += ["", "| | 1 client | 4 clients |", "|---|---|---|"]
    shared, loops = figures["prefixes"], figures["executors"]
    for title, side, key in (
        ("first token of prompts that share their first 400 tokens or so, ms", shared["none"], "first_token_ms"),
        ("the same with the prefix cache, ms", shared["prefixes"], "first_token_ms"),
        ("mixed prompts in process, tokens/s", loops["in process"], "tokens_per_s"),
        ("the same through BLS, tokens/s", loops["BLS"], "tokens_per_s"),
    ):
        lines.append(f"| {title} | {side['1'][key]:.0f} | {side['4'][key]:.0f} |")
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


def posts() -> str:
    """The figures that `scripts/bench posts --output docs/posts.json` recorded."""
    figures = json.loads((ROOT / "docs" / "posts.json").read_text("utf-8"))
    lines = [f"{figures['cores']} cores of an {figures['cpu']}:"]
    for post in figures["posts"].values():
        lines += ["", f"| {post['title']} | here | gain | the post's |", "|---|---|---|---|"]
        for row in post["rows"]:
            gain = "" if row["ratio"] is None else f"{row['ratio']:.1f}x"
            lines.append(f"| {row['technique']} | {row['value']} | {gain} | {row['claim']} |")
    return "\n".join(lines)


TABLES = {
    "posts": posts,
    "tasks": tasks,
    "architectures": architectures,
    "releases": releases,
    "decoders": decoders,
    "encoders": encoders,
    "seq2seqs": seq2seqs,
    "seq2seq": seq2seq,
    "generation": generation,
    "decoding": decoding,
}


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
