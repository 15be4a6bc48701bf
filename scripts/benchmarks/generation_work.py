"""The work of the benchmarks of text generation: prompts, and the lengths of their answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from builder.common.samples import TEXTS

WORKS = {  # least and most tokens of a prompt, and of an answer
    "mixed": ((16, 512), (16, 256)),
    "short": ((16, 32), (64, 128)),
    "long": ((2000, 2000), (64, 128)),  # shorter if a model has fewer positions
}


@dataclass(frozen=True)
class WorkItem:
    """One request: its prompt as text and as tokens, and the tokens of its answer."""

    text: str
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Cell:
    """Work of one column of a table; `context`: tokens of each prompt, if they are equal."""

    clients: int
    work: Sequence[WorkItem]
    longest: int  # tokens of a prompt and its answer
    context: int = 0


def make_work(tokenizer: Any, count: int, kind: str = "mixed", positions: int = 10**6) -> list[WorkItem]:
    """Create `count` requests that fit into `positions`; any count gives the same requests first."""
    generator = np.random.default_rng(0)
    words = " ".join(TEXTS).split()
    work = []
    for _ in range(count):
        prompt, answer = (int(np.exp(generator.uniform(np.log(least), np.log(most)))) for least, most in WORKS[kind])
        prompt = min(prompt, positions - WORKS[kind][1][1])
        start = int(generator.integers(0, len(words)))
        text = " ".join(words[(start + index) % len(words)] for index in range(prompt))
        ids = tokenizer(text)["input_ids"][:prompt]
        text = tokenizer.decode(ids)
        work.append(WorkItem(text, tokenizer(text)["input_ids"], answer))
    return work


def context_work(tokenizer: Any, count: int, context: int) -> list[WorkItem]:
    """Create `count` requests of `context` tokens each; answers are long enough to be written at once for a while."""
    words = " ".join(TEXTS).split()
    work = []
    for index in range(count):
        ids = tokenizer(" ".join((words[7 * index :] + words) * (1 + context // len(words))))["input_ids"][:context]
        text = tokenizer.decode(ids)
        work.append(WorkItem(text, tokenizer(text)["input_ids"], 64 + context // 50))
    return work


def make_cells(tokenizer: Any, positions: int, options: argparse.Namespace) -> dict[str, Cell]:
    """Return the work by clients, or by clients and context ("8/500")."""
    counts = [int(part) for part in options.concurrency.split(",")]
    cells: dict[str, Cell] = {}
    if options.contexts:
        for context in map(int, options.contexts.split(",")):
            for clients in counts:
                work = context_work(tokenizer, clients, context)
                longest = max(len(item.prompt) + item.new_tokens for item in work)
                cells[f"{clients}/{context}"] = Cell(clients, work, longest, context)
        return cells
    requests = {c: options.requests if c == 1 else max(options.requests, options.per_client * c) for c in counts}
    work = make_work(tokenizer, max(requests.values()), options.work, positions)
    longest = min(sum(most for _, most in WORKS[options.work]), positions)
    return {str(clients): Cell(clients, work[: requests[clients]], longest) for clients in counts}
