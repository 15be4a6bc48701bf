"""Tiny executors without a graph, whose answers depend on every value in their cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from builder.runtime.generation.executors.base import (
    CallPart,
    Executor,
    Geometry,
    ScoredCandidates,
    copy_slot,
    last_of_rows,
)
from builder.runtime.generation.executors.encoding import CrossGeometry, EncodingExecutor
from builder.runtime.generation.executors.onnxruntime_seq2seq import TextArena
from builder.runtime.generation.executors.paged import Paged, PagedRows

VOCABULARY, BLOCK = 50, 32


class ArenaExecutor(Executor):
    """Executor with keys and values in this process's memory, and no graph."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.arena = geometry.allocate()

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        copy_slot(self.arena, source, target, length, start)


class SumExecutor(ArenaExecutor):
    """Executor whose next token is a function of all tokens in the slot, read from its cache.

    A wrong slot, position or leftover shows in the text. One layer, one head, one number a position: the token itself.
    """

    def __init__(self, slots: int = 4, max_length: int = 32) -> None:
        super().__init__(Geometry(slots, max_length, VOCABULARY, ((1, 1),)))
        self.calls: list[tuple[int, int, int]] = []  # first slot, rows, new tokens

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: np.ndarray | None = None
    ) -> np.ndarray:
        rows, new = tokens.shape
        self.calls.append((first, rows, new))
        for row, length in enumerate(lengths.tolist()):
            self.arena["key_0"][first + row, 0, length : length + new, 0] = tokens[row]
        logits_positions = last_of_rows(tokens) if logits_positions is None else logits_positions
        logits = np.tile(np.linspace(0, 1, VOCABULARY, dtype=np.float32), (len(logits_positions), 1))
        for number, (row, column) in enumerate(zip(*np.divmod(logits_positions, new), strict=True)):
            held = self.arena["key_0"][first + row, 0, : lengths[row] + column + 1, 0].astype(np.int64)
            logits[number, next_token(held.tolist())] += 9.0
        return logits


class JoiningSumExecutor(SumExecutor):
    """Executor that prefills adjacent slots in one call, and leaves padding after each row, as on a GPU."""

    joins_prefills = True

    def run_together(self, parts: Sequence[CallPart]) -> list[np.ndarray]:
        first, longest = parts[0].first, max(part.tokens.shape[1] for part in parts)
        assert [part.first for part in parts] == list(range(first, first + len(parts))), "slots beside one another"
        assert not any(part.lengths.any() for part in parts), "a row that goes on is no beginning"
        answers = [self.run(*part) for part in parts]
        for part in parts:
            self.arena["key_0"][part.first, 0, part.tokens.shape[1] : longest] = -1000.0
        self.calls[-len(parts) :] = [(first, len(parts), longest)]
        return answers


class SearchingSumExecutor(SumExecutor):
    """Executor that finds the most probable tokens for searches."""

    has_likeliest = True

    def __init__(self, slots: int = 4, max_length: int = 32) -> None:
        super().__init__(slots, max_length)
        self.counts: list[int] = []  # of requested tokens

    def likeliest(self, part: CallPart, count: int) -> ScoredCandidates:
        self.counts.append(count)
        return likeliest(self.run(*part), count)


class PagedSumExecutor(Paged):
    """SumExecutor over blocks: a wrong table, or a block overwritten by another row, changes the text."""

    def __init__(self, slots: int, max_length: int, blocks: int) -> None:
        geometry = Geometry(slots, max_length, VOCABULARY, ((1, 1),), blocks=blocks)
        super().__init__(geometry, BLOCK)
        self.held = np.full((blocks, BLOCK), -1000.0)
        self.calls: list[int] = []  # rows
        self.tokens: list[int] = []  # of all rows, by call

    def _infer(self, rows: PagedRows) -> np.ndarray:
        begins = rows.begins
        self.calls.append(len(begins) - 1)
        self.tokens.append(begins[-1])
        tokens = np.zeros(begins[-1], np.int64)
        for row, (past, table) in enumerate(zip(rows.past, rows.tables, strict=True)):
            assert len(table) == -(-(past + begins[row + 1] - begins[row]) // BLOCK), "as many blocks as it has tokens"
            for index in range(begins[row], begins[row + 1]):
                position = past + index - begins[row]
                assert rows.positions[index] == position
                self.held[table[position // BLOCK], position % BLOCK] = rows.tokens[index]
                tokens[index] = self.next_token(self.held[table].ravel()[: position + 1].astype(np.int64).tolist())
        logits = np.tile(np.linspace(0, 1, VOCABULARY, dtype=np.float32), (len(rows.logits_positions), 1))
        logits[np.arange(len(logits)), tokens[rows.logits_positions]] += 9.0
        return logits

    def _copy_block(self, source: int, target: int) -> None:
        self.held[target] = self.held[source]

    def next_token(self, held: list[int]) -> int:
        return next_token(held)


def next_token(tokens: list[int]) -> int:
    """Return the token that SumExecutor gives after `tokens`."""
    return (sum((index + 3) * token for index, token in enumerate(tokens)) + len(tokens)) % VOCABULARY


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def likeliest(logits: np.ndarray, count: int) -> ScoredCandidates:
    """Return the candidates that a graph finds in logits (rows, vocabulary)."""
    tokens = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    totals = np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return ScoredCandidates(tokens, np.take_along_axis(logits, tokens, axis=-1), totals)


class ReadingExecutor(ArenaExecutor, EncodingExecutor):
    """SumExecutor with a source text in the arena: a wrong position, length or stale value changes the answer."""

    def __init__(self, slots: int) -> None:
        super().__init__(Geometry(slots, 32, VOCABULARY, ((1, 1),)))
        self.sources = TextArena(slots, CrossGeometry(32, 4, ((1, 1),)))
        self.texts: list[list[int]] = []  # lengths of the texts of each encoder call

    def attach(self, position: int, encoded: list[np.ndarray]) -> None:
        self.sources.attach(position, encoded)

    def assign(self, slot: int, position: int, beam: int) -> None:
        self.sources.assign(slot, position, beam)

    def encode(self, rows: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        self.texts.append([len(row) for row in rows])
        return [[np.array(row, np.float32).reshape(1, -1, 1)] * 2 for row in rows]

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: np.ndarray | None = None
    ) -> np.ndarray:
        logits = np.tile(np.linspace(0, 1, VOCABULARY, dtype=np.float32), (len(tokens), 1))
        places = self.sources.place_of[first : first + len(tokens)]
        seen = {
            (position, beam)
            for position, beam in zip(places, self.sources.beam_of[first:], strict=False)
            if position >= 0
        }
        assert len(seen) == (places >= 0).sum(), "two rows are the same beam of a text"
        for row, (length, position) in enumerate(zip(lengths.tolist(), places.tolist(), strict=True)):
            cache = self.arena["key_0"][first + row, 0, :, 0]
            cache[length] = tokens[row, 0]
            if position >= 0:
                text = self.sources.cross_arena["cross_key_0"][position, 0, : self.sources.lengths[position], 0]
                logits[row, answer_token(text.astype(int).tolist(), cache[: length + 1].astype(int).tolist())] = 9.0
        return logits if logits_positions is None else logits[logits_positions]


def answer_token(text: list[int], tokens: list[int]) -> int:
    """Return the token that ReadingExecutor gives after `tokens`, having read `text`."""
    return (next_token(text) * 7 + next_token(tokens)) % VOCABULARY


def answered(text: list[int], count: int, start: int = 1) -> list[int]:
    tokens = [start]
    for _ in range(count):
        tokens.append(answer_token(text, tokens))
    return tokens[1:]
