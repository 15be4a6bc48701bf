"""What every side of a benchmark is judged by, and how its figures are kept."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from scripts.benchmarks.circumstances import circumstances, refuse_other, write_figures
from scripts.benchmarks.generation import WORKS, make_work
from scripts.benchmarks.peers.clock import Clock


def test_the_clock_says_rates_and_the_medians_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock()
    for request, first, later in (("a", 0.5, 2.5), ("b", 1.5, 2.5), ("c", 1.0, 4.0)):
        now = 10.0
        clock.send(request)
        now = 10.0 + first
        clock.tokens(request)
        now = 10.0 + later
        clock.tokens(request, 4)
    now = 11.0
    clock.send("alone")
    now = 12.0
    clock.tokens("alone", 1)
    figures = clock.figures()
    assert figures["tokens_per_s"] == pytest.approx(16 / 4.0)
    assert figures["first_token_ms"] == pytest.approx(1000 * 1.0)
    assert figures["inter_token_ms"] == pytest.approx(1000 * 0.5)


def test_figures_of_other_sides_stay(tmp_path: Path) -> None:
    """A table is taken in several runs of a few minutes."""
    path = tmp_path / "figures.json"
    write_figures(path, {"date": "1", "models": {"gpt2": {"ours": {"1": {"tokens_per_s": 1}}}}})
    write_figures(path, {"date": "2", "models": {"gpt2": {"ours": {"8": {"tokens_per_s": 2}}, "theirs": {}}}})
    assert json.loads(path.read_text()) == {
        "date": "2",
        "models": {"gpt2": {"ours": {"1": {"tokens_per_s": 1}, "8": {"tokens_per_s": 2}}, "theirs": {}}},
    }


def test_figures_of_other_work_do_not_come_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    refuse_other(None, work="long")
    refuse_other(path, work="long")
    write_figures(path, {"work": "mixed"})
    refuse_other(path, work="mixed")
    with pytest.raises(SystemExit, match="figures of work 'mixed', and these are of 'long'"):
        refuse_other(path, work="long")


def test_figures_say_when_on_what_and_with_which_versions() -> None:
    assert set(circumstances()) == {"date", "cores", "cpu", "versions"}


class Words:
    """A tokeniser of one token a word."""

    def __call__(self, text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    def decode(self, words: list[str]) -> str:
        return " ".join(words)


@pytest.mark.parametrize("kind", WORKS)
def test_work_keeps_to_its_lengths_and_to_the_positions_of_the_model(kind: str) -> None:
    (least, most), (fewest, longest) = WORKS[kind]
    work = make_work(Words(), 20, kind)
    assert all(least - 1 <= len(item.prompt) <= most for item in work)
    assert all(fewest - 1 <= item.new_tokens <= longest for item in work)
    assert make_work(Words(), 5, kind) == work[:5]
    short = make_work(Words(), 20, kind, positions=400)
    assert all(len(item.prompt) + item.new_tokens <= 400 for item in short)
