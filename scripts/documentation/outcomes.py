"""Outcomes of architectures in a build and on each release's ONNX Runtime, and of clients against the gateway.

A build tries all architectures of transformers; the releases try the tested ones. scripts/architectures writes
docs/architectures.json, scripts/releases docs/releases.json, and scripts/interop docs/interop.json.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from builder.common.releases import version_tuple
from scripts.documentation.markdown import table
from scripts.documentation.recorded import read
from scripts.interoperability import CLIENTS

HEADS = {
    "CAUSAL_LM": "Text generation",
    "MULTIMODAL_LM": "Text part of models that read more",
    "MASKED_LM": "Masked words",
    "SEQUENCE_CLASSIFICATION": "Text classification",
    "TOKEN_CLASSIFICATION": "Token classification",
}
NOT_TRIED = "not tried"
MAX_LISTED_CHECKS = 8
SUBJECT = re.compile(r"^[\w.-]+ cannot be served for generation: ")  # the model type is in a column of its own


def every_architecture() -> str:
    """Return the outcome of a build for each architecture that transformers has a head for, by head."""
    document = read("architectures")
    parts = [
        f"Recorded by `scripts/architectures` with transformers {document['transformers']} "
        "([data](../architectures.json))."
    ]
    for head, title in HEADS.items():
        rows = [row for row in document["rows"] if row["head"] == head]
        parts += [f"## {title}", _verified(rows)]
        others = [row for row in rows if row["outcome"] not in ("verified", NOT_TRIED)]
        if others:
            parts.append(table(("model types", "outcome", "reason"), _by_reason(others)))
        untried = [row["model_type"] for row in rows if row["outcome"] == NOT_TRIED]
        if untried:
            parts.append(f"Not tried yet: {_names(untried)}.")
    return "\n\n".join(parts)


def _verified(rows: list[dict[str, Any]]) -> str:
    verified = [row for row in rows if row["outcome"] == "verified"]
    if not verified:
        return "None has been verified yet."
    errors = [row["error"] for row in verified if row["error"] is not None]
    largest = f", with relative errors of at most {max(errors):.0e}" if errors else ""
    return f"{len(verified)} of {len(rows)} verified{largest}: {_names(row['model_type'] for row in verified)}."


def _by_reason(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        groups[row["outcome"], SUBJECT.sub("", row["reason"]).replace("<", "&lt;")].append(row["model_type"])
    return [(_names(names), outcome, reason) for (outcome, reason), names in groups.items()]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def release_matrix() -> str:
    """Return each tested architecture and precision on the ONNX Runtime of each release."""
    document = read("releases")
    versions = sorted({version for graph in document["graphs"] for version in graph["runtimes"]}, key=version_tuple)
    reasons: list[str] = []
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for graph in document["graphs"]:
        cells = tuple(_mark(graph["runtimes"], version, reasons) for version in versions)
        groups[(graph["model_type"], *cells)].append(graph["precision"])
    rows = [(f"`{key[0]}`", ", ".join(precisions), *key[1:]) for key, precisions in groups.items()]
    legend = "".join(f"\n{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return (
        "Recorded by `scripts/releases` ([data](../releases.json)). ✓: verified; a number: see the list below; "
        f"empty: not tried.\n\n{table(('model type', 'precision', *versions), rows)}\n{legend}"
    )


def _mark(runtimes: Mapping[str, str], version: str, reasons: list[str]) -> str:
    outcome = runtimes.get(version, "")
    if outcome in ("verified", ""):
        return "✓" if outcome else ""
    if outcome not in reasons:
        reasons.append(outcome)
    return str(reasons.index(outcome) + 1)


def clients() -> str:
    """Return each client with its version, the checks that passed, and those that did not."""
    document = read("interop")
    rows = []
    for name, result in document.items():
        checks = result["checks"]
        passed = [check for check, outcome in checks.items() if outcome == "passed"]
        listed = "; ".join(passed) if len(passed) <= MAX_LISTED_CHECKS else f"{len(passed)} of {len(checks)}"
        others = {outcome: [c for c in checks if checks[c] == outcome] for outcome in checks.values()}
        others.pop("passed", None)
        missed = [f"{'; '.join(names)} ({_plain(outcome)})" for outcome, names in others.items()]
        rows.append((name, result["version"], listed, "<br>".join(missed)))
    rows += [(name, "", "", "not run yet") for name in CLIENTS if name not in document]
    return table(("client", "version", "passed", "did not"), rows)


def _plain(text: str) -> str:
    """Escape a text for a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
