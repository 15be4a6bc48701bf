"""Kinds of labelled data, told apart by the keys of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.labelled import encoder_decoders, generation, rankings, texts
from builder.checkpoints.labelled.encoder_decoders import EncoderDecoder
from builder.checkpoints.labelled.evaluation import Comparison, Evaluation, LabelledData, Row
from builder.checkpoints.rankers import Ranker
from builder.checkpoints.tasks.base import EncoderTask, Seq2SeqTask, encoder_task
from builder.common.data_folders import CORPUS, QUERIES, ROWS
from builder.common.errors import SpecError
from builder.runtime.contract import GenerationServing

RANKS = "ranks"  # instead of a key of labels: for tasks that rank
WRITES = "writes"  # instead of a key of labels: for tasks that go on with a text
TEXT = ("text", "text_input", "sentence", "content")


def by_task(checkpoint: Checkpoint) -> Comparison:
    """Return an encoder's answers in PyTorch, and its task's own agreement."""
    task = encoder_task(checkpoint.task)
    return Comparison(lambda sample: task.reference(checkpoint, sample), task.agreement, task.metric)


@dataclass(frozen=True)
class Kind:
    """Kind of rows. `keys`: the names that each value may have.

    `label`: the task's own key of the labels, RANKS or WRITES. `build`: makes the data of a checkpoint, its ranker or
    its encoder-decoder from rows and the names that they have. `compare`: makes what answers are compared with.
    """

    name: str
    keys: tuple[tuple[str, ...], ...]
    label: str
    build: Callable[[Any, Sequence[Row], Sequence[str]], LabelledData]
    compare: Callable[[Any], Comparison] = by_task

    def names_in(self, row: Row) -> list[str] | None:
        """Return the name of each value in `row`; None if it has another kind."""
        names = [next((name for name in choices if name in row), None) for choices in self.keys]
        return None if None in names else [str(name) for name in names]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(choices[0] for choices in self.keys)})"


QUERY = ("query", "anchor", "question")
PROMPT = ("question", "prompt", "query", "ctx")
REFERENCE = ("target", "target_text", "references", "reference", "summary", "highlights", "answers", "answer")
SCORE = ("score", "similarity", "similarity_score", "label")
KINDS = (
    Kind("questions with answers", (("question",), ("context",), ("answers", "answer")), "answers", texts.questions),
    Kind("words with tags", (("tokens", "words"), ("ner_tags", "tags", "labels")), "entities", texts.tags),
    Kind("texts with entities", (TEXT, ("entities",)), "entities", texts.entities),
    Kind("queries with the relevance of documents", (QUERY, ("documents",), ("relevance",)), RANKS, rankings.graded),
    Kind("queries with positives and negatives", (QUERY, ("positive", "positives", "pos")), RANKS, rankings.triplets),
    Kind(
        "pairs of texts with scores",
        (("sentence1", "text1", "query", "text"), ("sentence2", "text2", "document", "text_pair"), SCORE),
        RANKS,
        rankings.pairs,
    ),
    Kind("texts with labels", ((*TEXT, "sentence1", "text1"), ("label_text", "label")), "label", texts.labels),
    Kind(
        "questions with choices",
        (PROMPT, ("choices", "options", "endings"), ("answer", "label", "gold", "answerKey")),
        WRITES,
        generation.choices,
        generation.by_tokens,
    ),
    Kind(
        "prompts with answers",
        (("messages", *PROMPT), ("answer", "answers", "target", "completion")),
        WRITES,
        generation.prompts,
        generation.by_texts,
    ),
    Kind("texts", (TEXT,), WRITES, generation.scored_texts, generation.by_tokens),
    Kind(
        "texts with references",
        ((*TEXT, "source", "document", "article", "dialogue", *PROMPT), REFERENCE),
        "target_text",
        encoder_decoders.references,
        encoder_decoders.as_served,
    ),
)


def evaluation_of(
    checkpoint: Checkpoint,
    parts: Mapping[str, Sequence[Row]],
    limit: int | None,
    serving: GenerationServing | None = None,
) -> Evaluation:
    """Return the evaluation of a checkpoint on labelled data, on its first `limit` rows or queries.

    `parts`: the rows of a folder by part, or those of a file as `rows`. `serving`: settings of an encoder-decoder.
    Raises SpecError for data that does not fit the task.
    """
    ranker = _ranker(checkpoint)
    if CORPUS in parts and QUERIES in parts:
        if ranker is None:
            raise SpecError(
                f"the folder is for retrieval; expected, for {checkpoint.task.name}: {_expected(checkpoint)}"
            )
        return Evaluation(rankings.retrieval(ranker, parts, limit), by_task(checkpoint))
    rows = parts.get(ROWS, [])[:limit]
    if not rows:
        raise SpecError("the data has no rows; expected at least one")
    kind, names = _find_kind(checkpoint, rows[0])
    for number, row in enumerate(rows, 1):
        missing = [name for name in names if name not in row]
        if missing:
            raise SpecError(f"row {number} has no {missing[0]}; the first row has {', '.join(names)}")
    model = checkpoint if serving is None or serving.source is None else EncoderDecoder(checkpoint, serving)
    try:
        return Evaluation(kind.build(ranker if kind.label == RANKS else model, rows, names), kind.compare(model))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise SpecError(f"the data is not {kind}: {error}") from error


def _find_kind(checkpoint: Checkpoint, row: Row) -> tuple[Kind, list[str]]:
    """Return the kind that `row` has for the task, and the names of its values. Raises SpecError."""
    found = [(kind, names) for kind in KINDS if (names := kind.names_in(row)) is not None]
    fitting = _fitting(checkpoint)
    for kind, names in found:
        if kind in fitting:
            return kind, names
    what = f"{found[0][0].name} (keys {', '.join(row)})" if found else f"rows with the keys {', '.join(row)}"
    raise SpecError(f"the data has {what[:300]}; expected, for {checkpoint.task.name}: {_expected(checkpoint)}")


def _fitting(checkpoint: Checkpoint) -> list[Kind]:
    if not isinstance(checkpoint.task, EncoderTask | Seq2SeqTask):
        return [kind for kind in KINDS if kind.label == WRITES]
    labels, ranks = checkpoint.task.labels, _ranker(checkpoint) is not None
    return [kind for kind in KINDS if (ranks if kind.label == RANKS else kind.label in labels)]


def _ranker(checkpoint: Checkpoint) -> Ranker | None:
    return checkpoint.task.ranker(checkpoint) if isinstance(checkpoint.task, EncoderTask) else None


def _expected(checkpoint: Checkpoint) -> str:
    kinds = _fitting(checkpoint)
    folder = ["a folder with corpus, queries and qrels"] if any(kind.label == RANKS for kind in kinds) else []
    return "; ".join([*map(str, kinds), *folder]) or "nothing, for this task is not evaluated"
