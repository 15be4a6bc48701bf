"""`scripts/bench posts`: every post, or those named; a table each, and all figures as JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from builder.checkpoints.libraries import quiet_libraries
from scripts.benchmarks.circumstances import circumstances, replace_figures
from scripts.benchmarks.posts import Row, gpt2, quantisation, question_answering, training_aware

POSTS: dict[str, tuple[str, Callable[[Path, Path], list[Row]]]] = {
    "accelerated": ("Accelerated inference, GPT-2: 32 tokens read, 224 written", gpt2.accelerated_inference),
    "onnxruntime": ("GPT-2 with ONNX Runtime, fp32: one token after 256", gpt2.onnx_runtime),
    "bert": ("BERT-large for questions: the steps, one row of 384 tokens", question_answering.five_steps),
    "serving": ("BERT-large for questions, served: 50 requests in turn", question_answering.served),
    "quantisation": ("Static against dynamic int8, real MiniLM, 8 x 128 tokens", quantisation.static_and_dynamic),
    "training": ("Rounded after training or in training, a small BERT for questions", training_aware.training_aware),
    "arithmetic": ("8-bit arithmetic of an encoder, real MiniLM, 32 x 64 tokens", quantisation.arithmetic),
    "level": ("t5-small with Optimum's O3, one client, greedy", quantisation.optimum_level),
    "seq2seq": ("mBART and t5-small, one client, greedy (from `scripts/bench seq2seq`)", quantisation.encoder_decoders),
}


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench posts")
    parser.add_argument("posts", nargs="*", choices=[[], *POSTS], help="all when left out")
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where peers are installed")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    console = Console(width=120)
    figures: dict[str, Any] = {**circumstances(), "posts": {}}
    if options.output and options.output.exists():
        figures["posts"] = json.loads(options.output.read_text())["posts"]
    with tempfile.TemporaryDirectory() as folder:
        for name in options.posts or POSTS:
            title, measure = POSTS[name]
            rows = measure(Path(folder), options.environments)
            figures["posts"][name] = {"title": title, "rows": [asdict(row) for row in rows]}
            console.print(_table(title, rows))
            figures["posts"] = {post: figures["posts"][post] for post in POSTS if post in figures["posts"]}
            replace_figures(options.output, figures)


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("technique", "here", "gain", "the post's"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.technique, row.value, "" if row.ratio is None else f"{row.ratio:.1f}x", row.claim)
    return table


if __name__ == "__main__":
    main()
