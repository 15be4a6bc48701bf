"""Write the generated parts of README.md and docs/*.md, which stand between `<!-- NAME -->` and `<!-- /NAME -->`.

`scripts/docs` writes them; `scripts/docs --check` fails if they are out of date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from builder.runtime.encoder import pipeline, request_queue
from builder.runtime.generation import stats
from builder.runtime.shared import host
from scripts.documentation import classes, code, decoders, figures, fleets, outcomes, reference, retrieval, rules

ROOT = Path(__file__).parent.parent.parent
POSTS = ("accelerated", "onnxruntime", "bert", "serving", "quantisation", "training", "arithmetic", "level", "seq2seq")
PARTS: dict[str, Callable[[], str]] = {
    "results": figures.results,
    "tasks": code.tasks,
    "generating-tasks": code.generating_tasks,
    "request-options": code.request_options,
    "metrics": partial(code.metrics, stats.FAMILIES),
    "encoder-metrics": partial(code.metrics, (*pipeline.FAMILIES, *request_queue.FAMILIES)),
    "shared-metrics": partial(code.metrics, (*host.FAMILIES, *request_queue.FAMILIES)),
    "encoder-architectures": code.encoders,
    "decoder-architectures": code.decoders,
    "seq2seq-architectures": code.seq2seqs,
    "releases": code.releases,
    "cards": code.cards,
    "gpu-wheels": code.gpu_wheels,
    "every-architecture": outcomes.every_architecture,
    "release-classes": classes.classes,
    "release-matrix": outcomes.release_matrix,
    "clients": outcomes.clients,
    "configuration": reference.configuration,
    "pod": reference.pod,
    "commands": reference.commands,
    "rules": rules.rules,
    "bench-encoders": figures.encoders,
    "retrieval-sentence": retrieval.sentence,
    "retrieval-summary": retrieval.summary,
    "retrieval-models": retrieval.models,
    "retrieval-left-out": retrieval.left_out,
    "retrieval-versions": retrieval.versions,
    "bench-generation": partial(figures.generation, "generation"),
    "bench-fastest-peer": partial(figures.generation, figures.FASTEST_PEER),
    "bench-long-prompts": partial(figures.generation, "generation-long", " --work long"),
    "bench-states": decoders.states,
    "bench-steps": decoders.steps,
    "bench-lookups": decoders.lookups,
    "bench-seq2seq": figures.seq2seq,
    "bench-soak": figures.soak,
    "bench-fleet-builds": figures.fleet_builds,
    "bench-cluster": fleets.cluster,
    "bench-simulation": fleets.simulation,
    "posts-machine": figures.posts_machine,
    **{f"post-{key}": partial(figures.post, key) for key in POSTS},
}
MARK = re.compile(r"(<!-- (?P<name>[a-z0-9-]+) -->\n).*?(<!-- /(?P=name) -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return every page of the documentation, the README first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str) -> str:
    """Return `text` with its generated parts rendered again. Raises SystemExit for a name that is not in PARTS."""

    def part(match: re.Match[str]) -> str:
        if match["name"] not in PARTS:
            raise SystemExit(f"<!-- {match['name']} --> has no generator; known are {', '.join(PARTS)}")
        return f"{match[1]}{PARTS[match['name']]()}\n{match[3]}"

    return MARK.sub(part, text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a page is out of date, and write nothing")
    check = parser.parse_args().check
    texts = {path: path.read_text("utf-8") for path in pages()}
    unused = PARTS.keys() - {match["name"] for text in texts.values() for match in MARK.finditer(text)}
    if unused:
        raise SystemExit(f"no page has a place for {', '.join(sorted(unused))}: <!-- NAME --> ... <!-- /NAME -->")
    for path, text in texts.items():
        page = rendered(text)
        if page != text and check:
            raise SystemExit(f"{path.relative_to(ROOT)} is out of date: run scripts/docs")
        if page != text:
            path.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
