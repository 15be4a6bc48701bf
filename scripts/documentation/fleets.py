"""Tables of gateways over many Tritons: a fleet of processes, and one at scale, simulated."""

from __future__ import annotations

from typing import Any

from scripts.documentation.markdown import table
from scripts.documentation.recorded import read, recorded


def simulation() -> str:
    """Return the figures of a simulated fleet, with those that were measured."""
    document = read("simulation")
    scenario, figures = document["scenario"], document["figures"]
    wait, embedding = figures["first_piece_s"], figures["embedding_s"]
    command = " ".join(("scripts/simulate", *(f"--{name} {value:g}" for name, value in scenario.items())))
    rows = [
        ("requests", f"{figures['requests']:,}"),
        ("failed", f"{figures['failed']:,}"),
        ("failed since all servers that had the model were away", f"{figures['unserved']:,}"),
        ("streams that a crash cut after their first piece", f"{figures['cut_streams']:,}"),
        ("sent to another server after a failure", f"{figures['retried']:,}"),
        ("retries that the budget refused", f"{figures['refused_retries']:,}"),
        ("busy time of a server, 99th percentile over the mean", f"{figures['busy_p99_over_mean']:.2f}"),
        ("prompts whose beginning was cached, of those that some server had read", f"{figures['prefix_hit_rate']:.1%}"),
        ("a decoder's first piece, p50 and p99", f"{wait['p50']:.2f} s, {wait['p99']:.2f} s"),
        ("an encoder's answer, p50 and p99", f"{embedding['p50'] * 1000:.0f} ms, {embedding['p99'] * 1000:.0f} ms"),
    ]
    if measured := figures.get("measured"):  # left out where other programs ran meanwhile
        spent = measured["decision_us"]
        rows += [
            ("decisions a second of processor time, measured", f"{measured['decisions_per_s']:,}"),
            (
                "processor time of a decision, measured, p50 and p99",
                f"{spent['p50']:.0f} µs, {spent['p99']:.0f} µs",
            ),
        ]
    failures = [
        (
            kind,
            f"{each['avoided_after_s']:.1f} s",
            "not within the run" if each["back_after_s"] is None else f"{each['back_after_s']:.1f} s",
            f"{each['share']:.1%}",
            f"{each['median_share']:.1%}",
        )
        for kind, each in figures["failures"].items()
    ]
    heads = (
        "servers",
        "last request after the failure",
        "first request after the return",
        "requests meanwhile",
        "of the median server",
    )
    return "\n\n".join(
        (
            f"{recorded(command, 'simulation', document)}:",
            table(("", "result"), rows),
            f"{scenario['failures']} servers of each kind failed for the middle third of the time. Times are those of "
            "the slowest server of a kind; the last columns compare the middle third with the first one:",
            table(heads, failures),
        )
    )


def cluster() -> str:
    """Return what a gateway over several Tritons costs, and what became of requests while processes failed."""
    document = read("cluster")
    overhead = [
        (
            row["side"],
            f"{row['clients']}",
            f"{row['requests_per_s']:.0f}",
            f"{row['p50_ms']:.1f}",
            f"{row['p99_ms']:.1f}",
            f"{row['tokens_per_s']:.0f}",
        )
        for row in document["overhead"]
    ]
    counted = ("sent", "failed", "wrong", "cut", "sent_again")
    failures = [
        (failure, *(f"{row[name]:,}" for name in counted), f"{row['p99_s']:.2f} s", f"{row['max_s']:.1f} s")
        for failure, row in document["failures"].items()
    ]
    heads = ("failure", "requests", "failed", "wrong", "streams cut", "sent to the other gateway", "p99", "longest")
    batches = [
        (
            row["side"],
            f"{row['clients']}",
            f"{row['requests_per_s']:.0f}",
            f"{row['cpu_ms']:.2f}" if row["cpu_ms"] else "",
        )
        for row in document["batches"]
    ]
    return "\n\n".join(
        (
            f"{recorded('scripts/bench cluster', 'cluster', document)}:",
            table(("side", "clients", "embeddings/s", "p50, ms", "p99, ms", "tokens/s"), overhead),
            table(("asked", "clients", "embeddings/s", "gateway's processor time, ms"), batches),
            table(heads, failures),
            _models(document["models"]),
        )
    )


def _models(measured: dict[str, Any]) -> str:
    """Return what became of requests for many more models than memory."""
    rows = [
        (
            name,
            *(f"{turn[count]:,}" for count in ("sent", "failed", "wrong", "loads")),
            f"{turn['cold']:,}",
            *(f"{turn[kind]['p50']:.0f} ms, {turn[kind]['p99']:.0f} ms" for kind in ("loaded_ms", "cold_ms")),
            f"{turn['most_models']}, {turn['most_mb']:,} MB",
        )
        for name, turn in measured["turns"].items()
    ]
    heads = (
        "failure",
        "requests",
        "failed",
        "wrong",
        "loads",
        "waited for a load",
        "the others, p50 and p99",
        "those that waited",
        "most on one Triton",
    )
    return (
        f"{measured['models']} models, {measured['clients']} clients, turns of {measured['seconds']:.0f} s; each "
        f"Triton may take {measured['budget_mb']:,} MB, that of itself and {measured['fitting']} models of "
        f"{measured['model_mb']:.0f} MB:\n\n{table(heads, rows)}"
    )
