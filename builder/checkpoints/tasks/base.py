"""Base of the tasks: the head that each needs, the graph that it exports, and the measure of its answers."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from optimum.exporters.tasks import TasksManager
from transformers import PreTrainedConfig, PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint, CheckpointFiles
from builder.checkpoints.distances import PairedNumbers, difference
from builder.checkpoints.rankers import Ranker
from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS
from builder.runtime.encoder.task import PROMPT_TOKENS, TRUNCATE, TRUNCATED
from builder.runtime.encoder.task import Task as RuntimeTask
from builder.runtime.fields import Field
from builder.runtime.generation.options import COMMON, LANGUAGES, OUTPUTS, SOURCE
from builder.runtime.tokens import TOKENIZE, TOKENS

Sample = Mapping[str, Any]
Answer = Mapping[str, Any]
_pipelines: ContextVar[dict[str, Any] | None] = ContextVar("pipelines", default=None)


class TaskGraph(torch.nn.Module):
    """Module that is exported: tensors in by position, named as `inputs`; a tuple out, named as `outputs`."""

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.select(dict(zip(self.inputs, tensors, strict=True)))

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the model and take the outputs of the task."""
        result = self.model(**tensors)
        return tuple(result[name] for name in self.outputs)


class Task(ABC):
    """One task: the family of graphs that serves it, and the checkpoints that were saved for it."""

    name: str
    family: str  # builder/building/families/<family>.py
    head: str  # the task's name in Optimum's table of tasks and auto classes
    precedence = 0  # among tasks that claim a checkpoint, the highest wins
    unused_weights: tuple[str, ...] = ("pooler.",)  # prefixes the task's graph never reads
    longest: int | None = None  # tokens of one row, if neither the user nor the checkpoint sets a lower limit
    metric: str  # what `agreement` measures, as tables and errors name it
    threshold: float  # lowest mean agreement with PyTorch that is published
    text_alone: ClassVar[bool] = False  # True if a model that reads images or audio too is served for its text alone
    samples: tuple[Sample, ...]
    min_ranking: ClassVar[Mapping[str, float]] = {}  # lowest measures of `ranking` that are published, by name
    labels: tuple[str, ...] = ()  # keys of a sample that contain the right answer; `score` reads them

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    def answers_to(self, name: str) -> bool:
        """Return True if `name`, of a specification, means this task."""
        return name == self.name

    def required(self, quality: float | None) -> float:
        """Return the lowest mean agreement with PyTorch: the user's `quality`, or the task's own threshold."""
        return self.threshold if quality is None else quality

    def auto_class(self) -> Any:
        """Return transformers' auto class for the head, by Optimum's table."""
        return find_auto_class(self.head)

    def prepare(self, files: CheckpointFiles) -> CheckpointFiles:
        """Return the checkpoint as this task reads it. Raises CheckpointError."""
        return files

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        """Return True if a checkpoint with this configuration was saved for this task; here: if it has its head.

        `saved_by`: the class of sentence-transformers that its modules.json is of, or another library; None if there
        is none.
        """
        return self.has_head(config)

    def has_head(self, config: PreTrainedConfig) -> bool:
        """Return True if a checkpoint with this configuration was saved with the head that the task needs."""
        classes = model_class_names(self.auto_class()).values()
        return any(name in classes for name in config.architectures or [])

    @abstractmethod
    def fields(self, parameters: Mapping[str, Any]) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
        """Return all input and output tensors of the front model."""


class EncoderTask(Task):
    """A task of one engine call.

    Its emitted half is builder/runtime/encoder/tasks/<module>.py, which names its tensors.
    """

    family = "encoder"
    more_samples: tuple[Sample, ...] = ()  # judged as well where rounding may cost quality and the model is small
    per_token = True  # True if axis 1 of the graph's outputs is the sequence, whose padding is not compared
    extra_inputs: tuple[str, ...] = ()  # graph inputs beyond the tokenizer's, made by the emitted task
    graph_outputs: tuple[str, ...] = ("logits",)
    rows_begin_alike = False  # True if the rows of most requests have a long beginning in common
    has_late_chunking = False  # True if --late-chunking is one of its options
    takes_adapters = False  # True if --adapters is one of its options
    has_class_scores = False  # True if serving.dynamo is one of its options

    @property
    def runtime(self) -> type[RuntimeTask]:
        """Emitted half of this task."""
        task: type[RuntimeTask] = importlib.import_module(f"builder.runtime.encoder.tasks.{self.module}").Task
        return task

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        """Return the module to export, given the names of its inputs."""
        return TaskGraph(checkpoint.model, inputs, self.graph_outputs)

    def files(self, checkpoint: Checkpoint) -> dict[str, bytes]:
        """Return files of the version folder that the emitted task reads, by name. Raises CheckpointError."""
        return {}

    def samples_for(self, checkpoint: Checkpoint) -> tuple[Sample, ...]:
        """Return the samples to judge `checkpoint` on, unless the user gives others."""
        return self.samples

    @abstractmethod
    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the parameters of the emitted task, as JSON. Raises CheckpointError."""

    @abstractmethod
    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return transformers' answer to `sample`: the emitted task's outputs by name, without the batch axis."""

    def doubts(self, checkpoint: Checkpoint, answered: Sequence[tuple[Sample, Answer]] = ()) -> str | None:
        """Return a warning about a checkpoint whose answers may not be meant so, found by trying it; else None.

        `answered`: samples that `reference` answered already.
        """
        return None

    @abstractmethod
    def agreement(self, expected: Answer, actual: Answer) -> float:
        """Return how much two answers to one sample agree: 1 is equal, as `metric` measures it."""

    @abstractmethod
    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        """Return the numbers that both answers have, by kind. `agreement` covers those that only one of them has."""

    def ranking(self, expected: Sequence[Answer], actual: Sequence[Answer]) -> dict[str, float]:
        """Return how alike two answers to all samples rank them, by measure, 1 is equal; nothing if they rank nothing.

        `agreement` compares one answer at a time: rounding that moves near neighbours past each other hardly shows.
        """
        return {}

    def difference(self, expected: Answer, actual: Answer) -> tuple[float, str]:
        """Return the largest difference of a number and where it is; infinite if anything else differs."""
        return difference(expected, actual)

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Return measures of `answers` to `samples` that have labels, by name, from 0 to 1; the most important first.

        Raises ValueError with the form of a label.
        """
        raise ValueError(f"no labels: {self.name} has no measure for them")

    def ranker(self, checkpoint: Checkpoint) -> Ranker | None:
        """Return how the task ranks documents for a query; None if it does not."""
        return None

    def fields(self, parameters: Mapping[str, Any]) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
        inputs = (*self.runtime.inputs(parameters), TRUNCATE)
        outputs = (*self.runtime.outputs(parameters), TRUNCATED, PROMPT_TOKENS)
        if self.runtime.split_words or [field.name for field in inputs if not field.optional] != ["text_input"]:
            return inputs, outputs
        return (*inputs, TOKENIZE), (*outputs, TOKENS)  # a row is one text, whose tokens can be asked for


@dataclass(frozen=True)
class Instructions:
    """Instructions for a text-to-text checkpoint: a prefix, or one for each pair of languages ("en to de").

    `prefix`: None for the checkpoint's own, whatever it is to do. `options`: of its generation_config that apply to
    this task alone. `source`, `target`: languages if a request names none.
    """

    prefix: str | None = None
    pairs: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    target: str | None = None


class Seq2SeqTask(Task):
    """A task of an encoder-decoder: text in, text out."""

    family = "seq2seq"
    head = "text2text-generation"
    precedence = 2  # some of these checkpoints can fill masks too
    unused_weights = ()
    longest = 1024
    metric = "chrF"
    threshold = 0.9
    labels = ("target_text",)
    samples = tuple({"text_input": text} for text in TEXTS[::2])  # PyTorch answers them all, token by token

    def instructions(self, config: PreTrainedConfig, name: str) -> Instructions:
        """Return the checkpoint's instructions for this task, which the user called `name`."""
        return Instructions()

    def fields(self, parameters: Mapping[str, Any]) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
        return (*COMMON, *SOURCE, *(LANGUAGES if parameters.get("languages") else ())), OUTPUTS


def seq2seq_task(task: Task) -> Seq2SeqTask:
    """Return `task`, known to be an encoder-decoder's: its checkpoint was handed to that family."""
    assert isinstance(task, Seq2SeqTask)
    return task


def encoder_task(task: Task) -> EncoderTask:
    """Return `task`, known to be an encoder's: its checkpoint was handed to that family."""
    assert isinstance(task, EncoderTask)
    return task


def find_auto_class(head: str) -> Any:
    """Return transformers' auto class for a head, by Optimum's table."""
    return TasksManager.get_model_class_for_task(head)


def model_class_names(auto_class: Any) -> dict[str, str]:
    """Return model type to class name for every architecture that `auto_class` has a head for."""
    return {
        model_type: classes[0] if isinstance(classes, (tuple, list)) else classes
        for model_type, classes in auto_class._model_mapping._model_mapping.items()
    }


@contextmanager
def one_pipeline() -> Iterator[None]:
    """Create each pipeline of one checkpoint only once in the block: creating one takes as long as a short text."""
    token = _pipelines.set({})
    try:
        yield
    finally:
        _pipelines.reset(token)


def pipeline_of(checkpoint: Checkpoint, task: str) -> Any:
    """Return transformers.pipeline over the loaded checkpoint, the reference of most tasks."""
    return once_a_checkpoint(
        task,
        lambda: transformers.pipeline(task, model=checkpoint.model, tokenizer=checkpoint.tokenizer, device="cpu"),
    )


def once_a_checkpoint(name: str, create: Callable[[], Any]) -> Any:
    """Return the reference `name`, as `create` makes it; in a block of `one_pipeline` it is created once."""
    created = _pipelines.get()
    if created is None:
        return create()
    if name not in created:
        created[name] = create()
    return created[name]


def probe(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the model's inputs for a short text, (1, tokens) each: some heads need the tokenizer's special tokens."""
    return dict(checkpoint.tokenizer(TEXTS[0], return_tensors="pt"))


def cosine(expected: Any, actual: Any) -> float:
    """Return the mean cosine over rows of two arrays (rows, size)."""
    a, b = np.atleast_2d(np.asarray(expected, dtype=np.float64)), np.atleast_2d(np.asarray(actual, dtype=np.float64))
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(np.mean((a * b).sum(axis=-1) / np.maximum(norms, 1e-12)))


def label_list(config: PreTrainedConfig, labels: int) -> list[str]:
    """Return the labels in the order of the logits. Raises CheckpointError for a map with holes or of another size."""
    names = {int(index): str(name) for index, name in config.id2label.items()}
    if sorted(names) != list(range(labels)) or len(set(names.values())) != len(names):
        raise CheckpointError(
            f"id2label of config.json names {len(names)} labels ({', '.join(list(names.values())[:4])}...), the head "
            f"has {labels} outputs; give each output from 0 to {labels - 1} one name of its own"
        )
    unprintable = next((name for name in names.values() if not name.isprintable()), None)
    if unprintable is not None:
        raise CheckpointError(
            f"id2label of config.json has a label with control characters: {unprintable!r}; rename it"
        )
    return [names[index] for index in range(labels)]


def head_size(checkpoint: Checkpoint) -> int:
    """Return how many outputs the checkpoint's classification head has: from a run of it, unless it says so."""
    if checkpoint.head_size is not None:
        return checkpoint.head_size
    with torch.no_grad():
        return int(checkpoint.model(**probe(checkpoint)).logits.shape[-1])
