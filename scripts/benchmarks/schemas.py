"""Thousands of answers guided by JSON schemas: `scripts/bench schemas`.

Every pair of keywords of draft 2020-12, schemas drawn at random, and schemas of the shapes of JSONSchemaBench. Each is
either refused by name, or all random walks through what its guide allows end in documents that are valid under it. The
process that bounds the time of checking an expression is left out: it would take a quarter of a second for each schema.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from builder.runtime.generation import guides
from tests.generation.schema_net.generated import generated
from tests.generation.schema_net.pairs import pairs
from tests.generation.schema_net.shapes import shapes
from tests.generation.schema_net.walks import Walker, make_guides

SHOWN = 20  # of the schemas with wrong answers


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench schemas")
    parser.add_argument("--pairs", type=int, default=2, metavar="N", help="schemas of each pair of keywords; default 2")
    parser.add_argument("--generated", type=int, default=500, metavar="N", help="schemas drawn at random; default 500")
    parser.add_argument("--walks", type=int, default=4, metavar="N", help="random walks under each schema; default 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    guides.INTERSECTING = ()
    groups = {"pairs of keywords": pairs(options.pairs), "generated": generated(options.generated, options.seed)}
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        walker = Walker(make_guides(Path(scratch)), options.walks)
        for name, figures in _looked_at(walker, {**groups, **shapes()}):
            report[name] = figures
            print(json.dumps({name: figures}, indent=1, ensure_ascii=False), flush=True)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    invalid = sum(figures["invalid"] for figures in report.values())
    assert not invalid, f"{invalid} answers are invalid; see wrong"


def _looked_at(walker: Walker, groups: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    names: Sequence[str] = ("schemas", "accepted", "refused", "walks", "documents", "cut off", "invalid")
    for group, schemas in groups.items():
        findings = walker.look(schemas)
        counts = {name: findings.counts[name] for name in names}
        yield group, {**counts, "refusals": dict(findings.refusals.most_common()), "wrong": findings.wrong[:SHOWN]}


if __name__ == "__main__":
    main()
