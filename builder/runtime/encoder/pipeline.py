"""Answer the requests of one batch: read, tokenise, cut, infer, answer.

The callable `infer` takes and returns named numpy arrays; it belongs to an executor in Triton, or to a session in a
build or a test.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union
from weakref import WeakKeyDictionary

import numpy as np
from tokenizers import Encoding

from ..adapter_files import ADAPTER, ALL_ADAPTERS, FOLDER, Adapters, adapter_names
from ..contract import load_encoder
from ..fields import InputError, Tensors, any_text, as_bytes, option, refuse_large
from ..lora import Adapter, LoraStacks
from ..tokens import TOKENIZE, TOKENS
from .call_inputs import CallInputs, pad
from .cutting import cut, cut_sharing
from .task import HEADLESS, PROMPT_TOKENS, TRUNCATED, EncodingJob, Row, Task
from .text import TextEncoder

Infer = Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]
Answer = Union[dict[str, np.ndarray], Exception]


FAMILIES = (
    ("engine_calls", "COUNTER", "Calls of the engine"),
    ("tokens", "COUNTER", "Tokens of the texts, special tokens included"),
    ("padding_tokens", "COUNTER", "Tokens added to texts to make them as long as their batch mates"),
    ("loaded_timestamp_seconds", "GAUGE", "When the model was loaded, in seconds since 1970"),
)


@dataclass
class PendingRequest:
    """Request in progress: its task, its job, its rows and, once the engine has run, each row's outputs."""

    task: Task
    job: EncodingJob
    rows: list[Row]
    outputs: list[Mapping[str, np.ndarray]]


@dataclass
class Counts:
    """Tokens since the start: of the texts, and of the padded batches passed to the engine."""

    calls: int = 0
    tokens: int = 0
    padded_tokens: int = 0

    def values(self) -> dict[str, float]:
        """Return the current value of each family except the load time."""
        return {
            "engine_calls": self.calls,
            "tokens": self.tokens,
            "padding_tokens": self.padded_tokens - self.tokens,
        }


class Pipeline:
    """The whole path of a front model, without Triton. `lora`: stacks of the adapters that its requests may name."""

    def __init__(
        self,
        folder: Path,
        infer: Infer,
        map_calls: Callable[..., Iterable[Any]] = map,
        lora: LoraStacks | None = None,
    ) -> None:
        self.serving = load_encoder(folder)
        package = importlib.import_module(f".tasks.{self.serving.task}", __package__)
        task_type: type[Task] = package.Task
        self.text = TextEncoder(
            folder / "tokenizer.json", task_type.offsets, self.serving.truncation_side, task_type.split_words
        )
        self.folder = folder
        self.task = task_type(self.serving, self.text, folder)
        self.tasks: "WeakKeyDictionary[Adapter, Task]" = WeakKeyDictionary()  # of adapters with labels of their own
        self.adapters = None if lora is None else Adapters(folder.parent / FOLDER, lora)
        self.inputs = CallInputs(self.serving, lora)
        self.infer = infer
        self.map_calls = map_calls
        self.counts = Counts()

    def __call__(self, requests: Sequence[Tensors]) -> list[Answer]:
        """Answer each request: its output tensors, or an exception that concerns it alone."""
        answers, works = self._read(requests)
        failed = self._run(works)
        for index, work in works.items():
            try:
                if index in failed:
                    raise failed[index]
                answers[index] = self._answer(work)
            except Exception as error:
                answers[index] = error
        return [answers.get(index, RuntimeError("no answer was made")) for index in range(len(requests))]

    def feeds(self, requests: Sequence[Tensors]) -> tuple[list[dict[str, np.ndarray]], dict[int, Answer]]:
        """Return the engine's inputs for these requests, call by call, and, by index, the answers that need no call."""
        answers, works = self._read(requests)
        return [self._feeds(rows) for _, rows in self._calls(works)], answers

    def _read(self, requests: Sequence[Tensors]) -> tuple[dict[int, Answer], dict[int, PendingRequest]]:
        """Return answers that need no engine (errors, tokens, queries of a table), and the requests that need it."""
        answers: dict[int, Answer] = {}
        jobs: dict[int, EncodingJob] = {}
        tasks: dict[int, Task] = {}
        adapters: dict[int, Adapter] = {}
        for index, tensors in enumerate(requests):
            try:
                refuse_large(tensors, self.serving.limits)
                if name := any_text(tensors, ADAPTER.name):
                    if self.adapters is None:
                        raise InputError(f"{ADAPTER.name} is {name!r}, and this model takes no adapters; leave it out")
                    if name == ALL_ADAPTERS:
                        listed = json.dumps(adapter_names(self.adapters.folder))
                        answers[index] = {TOKENS.name: as_bytes([[listed]])}
                        continue
                    adapters[index] = self.adapters.find(name)
                elif self.adapters is not None and self.serving.parameters.get(HEADLESS):
                    names = ", ".join(adapter_names(self.adapters.folder)) or "none yet"
                    raise InputError(
                        f"{ADAPTER.name} is missing: this model has no head but its adapters'; it has {names}"
                    )
                task = tasks[index] = self._task_of(adapters.get(index))
                job = task.read(tensors)
                if option(tensors, TOKENIZE.name, False):
                    answers[index] = {TOKENS.name: as_bytes([[one] for one in self.text.tokens(job.texts)])}
                elif (answer := task.answer_without_engine(job)) is not None:
                    answers[index] = answer
                else:
                    jobs[index] = job
            except Exception as error:
                answers[index] = error
        works: dict[int, PendingRequest] = {}
        encodings = self._encode(jobs)
        for index, job in jobs.items():
            try:
                encoded = encodings[index]
                if isinstance(encoded, Exception):
                    raise encoded
                rows = tasks[index].rows(job, encoded)
                for row in rows:
                    row.adapter = adapters.get(index)
                tasks[index].refuse_many(sum(len(row.encoding) for row in rows), len(rows))
                works[index] = PendingRequest(tasks[index], job, rows, [{}] * len(rows))
            except Exception as error:
                answers[index] = error
        return answers, works

    def _task_of(self, adapter: Adapter | None) -> Task:
        """Return the task with the labels of `adapter`, if it has some of its own."""
        if adapter is None or not adapter.parameters:
            return self.task
        if adapter not in self.tasks:  # tables of transitions take milliseconds
            parameters = {**self.serving.parameters, **adapter.parameters}
            self.tasks[adapter] = type(self.task)(replace(self.serving, parameters=parameters), self.text, self.folder)
        return self.tasks[adapter]

    def warm_up(self) -> None:
        """Make serving.json's warm-up calls, and one of each length of a bucket of several rows."""
        for feeds in self.inputs.warm_up():
            self.infer(feeds)

    def _encode(self, jobs: Mapping[int, EncodingJob]) -> dict[int, list[Encoding] | Exception]:
        """Tokenise all jobs' texts, in one call for those that are cut the same way; retry each alone if it fails."""
        encodings: dict[int, list[Encoding] | Exception] = {}
        for truncation in dict.fromkeys(job.truncation for job in jobs.values()):
            members = [index for index, job in jobs.items() if job.truncation == truncation]
            try:
                batch = iter(self.text([text for index in members for text in jobs[index].texts], truncation))
                encodings.update({index: [next(batch) for _ in jobs[index].texts] for index in members})
            except Exception:
                encodings.update({index: self._encode_alone(jobs[index]) for index in members})
        return encodings

    def _encode_alone(self, job: EncodingJob) -> list[Encoding] | Exception:
        try:
            return self.text(job.texts, job.truncation)
        except Exception as error:
            return error

    def _run(self, works: Mapping[int, PendingRequest]) -> dict[int, Exception]:
        """Run all rows of all requests; return the requests whose call failed."""
        failed: dict[int, Exception] = {}
        calls = self._calls(works)
        feeds = (self._feeds(rows) for _, rows in calls)  # in turn: a call may need the stacks of the one before it
        results = (self.map_calls if len(calls) > 1 else map)(self._try_infer, feeds)
        for (places, _), outputs in zip(calls, results):
            if isinstance(outputs, Exception):
                failed.update({index: outputs for index, _ in places})
                continue
            for at, (index, position) in enumerate(places):
                works[index].outputs[position] = {name: array[at] for name, array in outputs.items()}
        return failed

    def _calls(self, works: Mapping[int, PendingRequest]) -> list[tuple[list[tuple[int, int]], list[Row]]]:
        """Return calls of rows of similar length: the places of their rows, as (request, index), and the rows."""
        places = [(index, position) for index, work in works.items() for position in range(len(work.rows))]
        rows = [works[index].rows[position] for index, position in places]
        calls = [call for group in self._alike(rows) for call in self._cut(rows, group)]
        return [([places[i] for i in call], [rows[i] for i in call]) for call in calls]

    def _alike(self, rows: Sequence[Row]) -> list[list[int]]:
        """Group rows that may share a call: all or, if the model needs it, those of one length or token count.

        The rows of a group have no more adapters than the stacks take at once.
        """
        alike = self.serving.batching.alike
        groups: dict[tuple[int, int], list[int]] = {}
        adapters: dict[str, int] = {}
        for index, row in enumerate(rows):
            ids, part = row.encoding.ids, 0
            kind = 0 if alike is None else len(ids) if alike == "length" else ids.count(alike)
            if self.adapters is not None and row.adapter is not None:
                part = adapters.setdefault(row.adapter.digest, len(adapters)) // self.adapters.stacks.capacity
            groups.setdefault((kind, part), []).append(index)
        return list(groups.values())

    def _cut(self, rows: Sequence[Row], group: Sequence[int]) -> list[list[int]]:
        batching = self.serving.batching
        if batching.shares_prefixes:
            calls = cut_sharing(pad([rows[i].encoding.ids for i in group], -1), batching)
        else:
            calls = cut([len(rows[i].encoding) for i in group], batching)
        return [[group[i] for i in call] for call in calls]

    def _try_infer(self, feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray] | Exception:
        try:
            return self.infer(feeds)
        except Exception as error:
            return error

    def _feeds(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Return the engine's inputs for one call, and count it."""
        inputs, padded = self.inputs.of(rows)
        self.counts.calls += 1
        self.counts.tokens += sum(len(row.encoding) for row in rows)
        self.counts.padded_tokens += padded[0] * padded[1]
        return inputs

    def _answer(self, work: PendingRequest) -> dict[str, np.ndarray]:
        tensors = work.task.answer(work.job, work.rows, work.outputs)
        batch = len(next(iter(tensors.values())))
        truncated, tokens = np.zeros((batch, 1), dtype=bool), np.zeros((batch, 1), dtype=np.int32)
        rows_per_answer = max(1, len(work.job.texts) // batch)
        for row in work.rows:
            truncated[row.source // rows_per_answer, 0] |= row.truncated
            tokens[row.source // rows_per_answer, 0] += len(row.encoding)
        return {**tensors, TRUNCATED.name: truncated, PROMPT_TOKENS.name: tokens}


__all__ = ["Answer", "InputError", "Pipeline"]
