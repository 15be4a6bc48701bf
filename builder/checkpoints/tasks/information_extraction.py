"""Entities, classes, relations and structures of a text by the schema that a request names, by a GLiNER2 checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tokenizers import processors
from transformers import PreTrainedConfig, PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint, CheckpointFiles
from builder.checkpoints.gliner2.layers import Gliner2Head, Places, Scores
from builder.checkpoints.gliner2.predict import fill_schema
from builder.checkpoints.gliner2.settings import ENCODER_FILE, GLINER2, Gliner2Settings
from builder.checkpoints.gliner2.weights import load_head
from builder.checkpoints.metrics import Span
from builder.checkpoints.tasks.base import Answer, Sample, TaskGraph, once_a_checkpoint
from builder.checkpoints.tasks.entity_extraction import LABELS, EntityExtraction
from builder.common.errors import CheckpointError
from builder.common.samples import MORE_TEXTS, TEXTS
from builder.runtime.encoder.schemas import MARKERS, entity_types, read_schema
from builder.runtime.encoder.tasks.information_extraction import OUTPUTS

OTHERS: tuple[Mapping[str, Any], ...] = (  # parts of schemas, asked for beside entities in turn
    {
        "classifications": [
            {"task": "topic", "labels": ["travel", "business", "nature"], "multi_label": True, "cls_threshold": 0.0}
        ]
    },
    {"relations": ["works for", "located in"]},
    {"structures": {"event": {"fields": [{"name": "what", "dtype": "str"}, {"name": "when"}]}}},
)


def _samples(texts: Sequence[str]) -> tuple[Sample, ...]:
    """Return requests for 2 to 7 entity types, three of four with another part of a schema, and for all scores."""
    samples = []
    for place, text in enumerate(texts):
        labels = list(LABELS[: 2 + place % 6])
        asked: Sample = {"labels": labels}
        if place % 4:
            asked = {"schema": json.dumps({"entities": labels, **OTHERS[place % 4 - 1]})}
        samples.append({"text_input": text, **asked, "threshold": 0.0})
    return tuple(samples)


class SchemaGraph(TaskGraph):
    """The encoder and all layers after it; the outputs are those of `Scores`."""

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], head: Gliner2Head) -> None:
        super().__init__(model, inputs, Scores._fields)
        self.head = head

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        places = Places(*(tensors.pop(name) for name in Places._fields))
        return tuple(self.head(self.model(**tensors).last_hidden_state, places))


class InformationExtraction(EntityExtraction):
    name = "information-extraction"
    extra_inputs = Places._fields
    metric = "agreement of what is found"
    samples = _samples(TEXTS)
    more_samples = _samples(MORE_TEXTS)

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        return saved_by == GLINER2

    def prepare(self, files: CheckpointFiles) -> CheckpointFiles:
        """Return the checkpoint without tokens around a text. Raises CheckpointError for one without its markers."""
        if not isinstance(files.gliner, Gliner2Settings):
            raise CheckpointError(f"{files.source} has no {ENCODER_FILE}: {self.name} is for checkpoints of {GLINER2}")
        tokenizer = files.tokenizer
        missing = [marker for marker in MARKERS if len(tokenizer.tokenize(marker)) != 1]
        if missing:
            raise CheckpointError(
                f"the tokenizer of {files.source} has no token {missing[0]}; expected the one that {GLINER2} saves"
            )
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="$A:0", pair="$A:0 $B:1", special_tokens=[]
        )
        tokenizer.model_input_names = ["input_ids", "attention_mask"]  # the library passes no others
        return files

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        return SchemaGraph(checkpoint.model, inputs, load_head(checkpoint))

    def samples_for(self, checkpoint: Checkpoint) -> tuple[Sample, ...]:
        return self.samples

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        settings = checkpoint.gliner
        assert isinstance(settings, Gliner2Settings)  # checked by `prepare`
        return {"max_width": settings.max_width}

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return what GLiNER2's own computation finds in one text alone."""
        head = once_a_checkpoint("gliner2", lambda: load_head(checkpoint))
        schema = read_schema(sample["schema"], "schema") if "schema" in sample else entity_types(sample["labels"])
        answer = fill_schema(checkpoint, head, sample["text_input"], schema, sample.get("threshold", 0.5))
        return {name: json.dumps(answer[name], ensure_ascii=False) for name in OUTPUTS}

    def scores(self, answer: Answer) -> dict[Span, float]:
        """Return the scores of all that was found, by places and the name of the type, class or field."""
        return dict(_scored(answer))

    def exclude(self, one: Span, other: Span) -> bool:
        return one[2] == other[2] and super().exclude(one, other)


def _scored(answer: Answer) -> Iterator[tuple[Span, float]]:
    found = {name: json.loads(answer[name]) for name in OUTPUTS}
    yield from (_named(one, one["label"]) for one in found["entities"])
    for task, chosen in found["classifications"].items():
        yield from (_named(one, f"{task}: {one['label']}") for one in chosen)
    numbers: Counter[str] = Counter()
    for one in found["relations"]:
        numbers[one["label"]] += 1
        yield from (_named(one[end], f"{one['label']} {numbers[one['label']]}, {end}") for end in ("head", "tail"))
    for name, instances in found["structures"].items():
        for number, instance in enumerate(instances, 1):
            for field, value in instance.items():
                values = value if isinstance(value, list) else [value] if value else []
                yield from (_named(one, f"{name} {number}, {field}") for one in values)


def _named(found: Mapping[str, Any], label: str) -> tuple[Span, float]:
    """Return the place and the score of what was found; a choice, which has no place, is part of the label."""
    if "start" in found:
        return (found["start"], found["end"], label), found["score"]
    return (0, 0, f"{label}: {found['text']}" if "text" in found else label), found["score"]


TASK = InformationExtraction()
