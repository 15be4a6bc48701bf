"""Count what guessing by prompt lookup gains on real texts, beside a rule without probabilities.

Benchmarks of generation have random weights, whose texts soon repeat themselves and flatter guessing. Here the texts
are this project's own: a page continued after its first half, a module likewise, and a module written again with other
names. Sequences take their tokens from the text, in steps of `rows` sequences, and a step of n tokens takes the time
that `scripts/bench step` recorded. So nothing is timed, and the same texts give the same figures. The rule to compare
with is that of openvino-genai's sample: 5 tokens after up to 3 equal ones, always.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from builder.runtime.generation.scheduler import MAX_STEP_TOKENS
from builder.runtime.generation.slot_cache import common_length
from builder.runtime.generation.speculation import PromptLookup, least_probability
from scripts.benchmarks.circumstances import write_figures

ROOT = Path(__file__).parents[2]
LENGTH, ROWS = 300, (1, 4, 8, 16)  # tokens of a prompt, and of its continuation; sequences in a step
RENAMED = (("self", "this"), ("tokens", "ids"), ("name", "title"))


class Rule(Protocol):
    """Propose the next tokens of one sequence."""

    def extend(self, tokens: list[int]) -> None: ...

    def propose(self, limit: int, least: float) -> list[int]: ...


class FixedRule:
    """Rule that proposes 5 tokens after up to 3 equal ones, whatever came of it before."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens

    def propose(self, limit: int, least: float) -> list[int]:
        for length in (3, 2, 1):
            ending = self.tokens[-length:]
            for start in range(len(self.tokens) - length - 1, -1, -1):
                if self.tokens[start : start + length] == ending:
                    return self.tokens[start + length :][: min(5, limit)]
        return []


RULES: Mapping[str, Callable[[Sequence[int]], Rule]] = {
    "this project": PromptLookup,
    "5 tokens after up to 3, always": FixedRule,
}


@dataclass(frozen=True)
class Text:
    """Tokens of a prompt, and those that follow it."""

    prompt: list[int]
    answer: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench lookups")
    parser.add_argument("--step", default="openvino:int8", help="side of docs/step.json whose steps of GPT-2 are taken")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    recorded = json.loads((ROOT / "docs" / "step.json").read_text("utf-8"))["models"]["gpt2"][options.step]
    costs = [(1, recorded["step_ms"]), *((int(tokens), ms) for tokens, ms in recorded["tokens_ms"].items())]
    figures = {
        kind: {title: {str(rows): simulate(rule, texts, rows, costs) for rows in ROWS} for title, rule in RULES.items()}
        for kind, texts in read_texts().items()
    }
    Console(width=130).print(_table(figures))
    write_figures(options.output, {"step": options.step, "texts": figures})


def read_texts() -> dict[str, list[Text]]:
    """Return the texts by kind: of the pages and of every fourth module that is long enough."""
    from tests.models import minilm

    tokenizer = AutoTokenizer.from_pretrained(minilm())

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def continued(texts: Sequence[str]) -> Iterator[Text]:
        for ids in map(tokens, texts):
            if len(ids) >= 2 * LENGTH:
                yield Text(ids[:LENGTH], ids[LENGTH : 2 * LENGTH])

    pages = [path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    modules = [path.read_text("utf-8") for path in sorted((ROOT / "builder").rglob("*.py"))[::4]]
    return {
        "pages, without tables": list(continued([re.sub(r"(?m)^\|.*\n", "", page) for page in pages])),
        "modules": list(continued(modules)),
        "modules with other names": [
            Text(text.prompt + text.answer, tokens(_renamed(tokenizer.decode(text.answer))))
            for text in continued(modules)
        ],
    }


def _renamed(text: str) -> str:
    for old, new in RENAMED:
        text = text.replace(old, new)
    return text


def simulate(
    rule: Callable[[Sequence[int]], Rule], texts: Sequence[Text], rows: int, costs: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """Return `speed`, in multiples of that without guesses, and the shares of tokens `guessed` and of guesses `right`.

    `costs`: tokens of a step and its milliseconds. It ends when fewer than `rows` sequences are left.
    """
    waiting = list(texts)
    running: list[tuple[Rule, list[int]]] = []
    spent, written, proposed, kept = 0.0, 0, 0, 0
    plain = rows / step_ms(rows, costs)
    while True:
        running = [one for one in running if one[1]]
        while waiting and len(running) < rows:
            text = waiting.pop()
            running.append((rule(text.prompt), list(text.answer)))
        if len(running) < rows:
            return {"speed": written / spent / plain, "guessed": kept / written, "right": kept / max(1, proposed)}
        tokens = rows
        for lookup, left in running:
            proposal = lookup.propose(min(MAX_STEP_TOKENS - tokens, len(left) - 1), least_probability(rows))
            right = common_length(proposal, left)
            lookup.extend(left[: right + 1])
            del left[: right + 1]
            tokens, written = tokens + len(proposal), written + right + 1
            proposed, kept = proposed + len(proposal), kept + right
        spent += step_ms(tokens, costs)


def step_ms(tokens: int, costs: Sequence[tuple[int, float]]) -> float:
    """Return the time of a step of `tokens` from the recorded ones, on a line past the last."""
    counts, times = zip(*costs, strict=True)
    if tokens <= counts[-1]:
        return float(np.interp(tokens, counts, times))
    return float(times[-1] + (tokens - counts[-1]) * (times[-1] - times[-2]) / (counts[-1] - counts[-2]))


def _table(figures: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> Table:
    table = Table(title="speed in multiples of that without guesses; of the tokens, guessed", title_justify="left")
    for column in ("text", "rule", *(f"rows: {rows}" for rows in ROWS)):
        table.add_column(column)
    for kind, rules in figures.items():
        for title, rows in rules.items():
            table.add_row(kind, title, *(f"{one['speed']:.2f} ({one['guessed']:.0%})" for one in rows.values()))
    return table


if __name__ == "__main__":
    main()
