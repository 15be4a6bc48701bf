"""Run a canary of a version: a gateway sends it a share of the real requests; end it early if the version does worse.

Knows the gateway's admin route and its counts (builder/serving/gateway/canary.py); knows no models.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from builder.common.errors import ServeError

MIN_REQUESTS = 50  # requests of the candidate that a verdict needs
MAX_MORE_FAILURES = 0.01  # share of failed requests allowed above that of the running version
POLL_S = 1.0
OnFigures = Callable[["CanaryFigures", float], None]  # called with the counts so far, and the seconds that are left
TIMEOUT_S = 30.0
TIMES = {"first_ms": "until the first answer", "between_ms": "between the answers of a stream"}


@dataclass(frozen=True)
class CanaryFigures:
    """Counts of both versions at a gateway: answers, failures, times in milliseconds."""

    running: Mapping[str, Any]
    candidate: Mapping[str, Any]

    @property
    def requests(self) -> int:
        """Number of requests sent to the candidate."""
        return int(self.candidate["answers"] + self.candidate["failures"])

    def reasons_against(self, slower: float) -> list[str]:
        """Return the reasons against the candidate: it fails more often, or takes longer than allowed."""
        reasons = []
        failing = [side["failures"] / max(1, side["answers"] + side["failures"]) for side in self._sides]
        if failing[1] > failing[0] + MAX_MORE_FAILURES:
            reasons.append(
                f"{self.candidate['failures']} of its {self.requests} requests failed ({failing[1]:.1%}; of version "
                f"{self.running['version']} {failing[0]:.1%}): {self.candidate['failure']}"
            )
        for name, says in TIMES.items():
            before, after = (side[name]["p50"] for side in self._sides)
            if before and after and after > slower * before:
                reasons.append(f"it takes {after / before:.2f} times as long {says}; at most {slower} is allowed")
        return reasons

    def table(self, name: str) -> Table:
        table = Table(title=f"{name}: both versions under the gateway's requests", title_justify="left")
        for column in ("version", "answers", "failures", "p50 ms", "p90 ms", "p99 ms", "between p50 ms"):
            table.add_column(column, justify="right")
        for side in self._sides:
            times = [side["first_ms"][q] for q in ("p50", "p90", "p99")] + [side["between_ms"]["p50"]]
            counts = (side["version"], side["answers"], side["failures"])
            table.add_row(*map(str, counts), *("-" if ms is None else f"{ms:.1f}" for ms in times))
        return table

    @property
    def _sides(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return self.running, self.candidate


@dataclass(frozen=True)
class CanaryShare:
    """`share` (0 to 1) of a model's requests at the gateway `url`, for `candidate`. `versions`: numbers of the two."""

    url: str
    key: str
    model: str
    candidate: str
    versions: tuple[int, int]
    share: float

    def order(self, share: float) -> CanaryFigures:
        """Request this share of the gateway for the next seconds and return its counts. Raises ServeError."""
        body = {"model": self.model, "candidate": self.candidate, "versions": self.versions, "share": share}
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url}/admin/canary", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise ServeError(f"the gateway at {self.url} refuses the canary: {_reason(error)}") from error
        except (OSError, ValueError) as error:
            raise ServeError(
                f"no gateway answers at {self.url} ({error}); start one: build-repo gateway --admin-key FILE"
            ) from error
        return CanaryFigures(answer["running"], answer["candidate"])


def watch(
    order: Callable[[float], CanaryFigures],
    share: float,
    seconds: float,
    slower: float,
    poll_s: float = POLL_S,
    on_figures: OnFigures = lambda figures, left: None,
) -> tuple[CanaryFigures, list[str]]:
    """Run a canary for `seconds`, or until the candidate does worse. Returns the counts and the reasons against it.

    The candidate has no share afterwards. `order`: the method of a CanaryShare.
    """
    end = time.monotonic() + seconds
    try:
        while True:
            figures = order(share)
            worse = figures.reasons_against(slower) if figures.requests >= MIN_REQUESTS else []
            left = end - time.monotonic()
            if worse or left <= 0:
                break
            on_figures(figures, left)
            time.sleep(poll_s)
    finally:
        order(0.0)
    if figures.requests < MIN_REQUESTS:
        worse = [
            f"{figures.requests} requests came to it in {seconds:g} s, and {MIN_REQUESTS} are needed to judge by: "
            "watch longer (--watch), or with a larger share"
        ]
    return figures, worse


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
