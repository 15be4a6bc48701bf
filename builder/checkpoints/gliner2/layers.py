"""Layers of GLiNER2 after the encoder, with the names of its weights: tokens to scores of spans, counts and classes.

Sources: gliner2 2.1.0, models/span/model.py (SpanExtractorModel), layers.py (CountLSTM, CountLSTMv2, CountLSTMoE,
DownscaledTransformer).
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch.nn import functional

from builder.checkpoints.gliner.layers import SpanMarkers, picked
from builder.checkpoints.gliner2.settings import Gliner2Settings

COUNTS = 20  # classes of the number of instances, from 0 on; also the rows of the table of their positions
INSTANCES = COUNTS - 1  # the most of one relation or structure
EXPERTS = 4
SMALL, HEADS = 128, 4  # size and heads of the transformer between the fields of an instance


class Scores(NamedTuple):
    """Logits that fill a schema.

    `spans`: of entities (rows, words, width, labels). `instances`: of fields (rows, words, width, instances, fields).
    `counts`: of the number of instances (rows, prompts, classes). `classes`: (rows, choices).
    """

    spans: torch.Tensor
    instances: torch.Tensor
    counts: torch.Tensor
    classes: torch.Tensor


class Places(NamedTuple):
    """Tokens of a row: the first of each word, and the markers of a schema, (rows, n) each; 0 fills shorter rows.

    `labels`: of entity types. `fields`: of relations and structures. `choices`: of classifications. `prompts`: the one
    before each list of entity types or fields.
    """

    words: torch.Tensor
    labels: torch.Tensor
    fields: torch.Tensor
    choices: torch.Tensor
    prompts: torch.Tensor


class FieldTransformer(torch.nn.Module):
    """Mixes entity types, and the fields of each instance."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.in_projector = torch.nn.Linear(size, SMALL)
        layer = torch.nn.TransformerEncoderLayer(SMALL, HEADS, 2 * SMALL, batch_first=True)
        self.transformer = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out_projector = _mlp(size + SMALL, (size, size), size)

    def forward(self, vectors: torch.Tensor, places: Places) -> torch.Tensor:
        """Return features of `vectors`, of labels and of the fields of each instance: (rows, n, size) both.

        Labels see each other, and fields those of their relation or structure and instance.
        """
        rows, labels = places.labels.shape
        projected = self.in_projector(vectors)
        of_labels = self._mixed(projected[:, :labels].unsqueeze(1), (places.labels > 0).long())
        instances = projected[:, labels:].reshape(rows, INSTANCES, -1, SMALL)
        of_fields = self._mixed(instances, _lists(places))
        mixed = torch.cat([of_labels.flatten(1, 2), of_fields.flatten(1, 2)], dim=1)
        return cast(torch.Tensor, self.out_projector(torch.cat([mixed, vectors], dim=-1)))

    def _mixed(self, features: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
        """Return features (rows, instances, n, size) that see those with the same number in `lists`, (rows, n)."""
        together = lists.unsqueeze(1) == lists.unsqueeze(2)
        bias = torch.where(together, 0.0, torch.finfo(features.dtype).min)[:, None, None]
        for layer in self.transformer.layers:
            features = _encoded(cast(torch.nn.TransformerEncoderLayer, layer), features, bias)
        return features


class Counting(torch.nn.Module):
    """Vectors to compare spans with, from markers: of entity types, and of a field in each of its instances."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.kind = kind
        self.pos_embedding = torch.nn.Embedding(COUNTS, size)
        self.gru = torch.nn.GRU(size, size)
        if kind == "count_lstm":
            self.projector = _mlp(2 * size, (4 * size,), size)
        elif kind == "count_lstm_v2":
            self.transformer = FieldTransformer(size)
        else:
            self.w1 = torch.nn.Parameter(torch.empty(EXPERTS, size, 2 * size))
            self.b1 = torch.nn.Parameter(torch.empty(EXPERTS, 2 * size))
            self.w2 = torch.nn.Parameter(torch.empty(EXPERTS, 2 * size, size))
            self.b2 = torch.nn.Parameter(torch.empty(EXPERTS, size))
            self.router = torch.nn.Sequential(
                torch.nn.Linear(size, size), torch.nn.GELU(), torch.nn.Linear(size, EXPERTS), torch.nn.Softmax(dim=-1)
            )

    def forward(self, labels: torch.Tensor, fields: torch.Tensor, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        """Return vectors of `labels` (rows, n, size) and of `fields` (rows, instances, m, size), (rows, m, size)."""
        states = self._states(labels, fields)
        own = torch.cat([labels, fields.repeat(1, INSTANCES, 1)], dim=1)
        if self.kind == "count_lstm":
            vectors = self.projector(torch.cat([states, own], dim=-1))
        elif self.kind == "count_lstm_v2":
            vectors = self.transformer(states + own, places)
        else:
            hidden = functional.gelu(torch.einsum("rnd,edh->rneh", states, self.w1) + self.b1)
            experts = torch.einsum("rneh,ehd->rned", hidden, self.w2) + self.b2
            vectors = (self.router(states).unsqueeze(-1) * experts).sum(dim=2)
        of_fields = vectors[:, labels.shape[1] :].reshape(fields.shape[0], INSTANCES, *fields.shape[1:])
        return vectors[:, : labels.shape[1]], of_fields

    def _states(self, labels: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        """Return the states of a GRU that begins with a marker and reads the positions of the instances.

        First those of labels, which have one instance, then those of fields in the first instance, the second, ...:
        (rows, n + instances * m, size).
        """
        state, states = torch.cat([labels, fields], dim=1), []
        of_input, of_state = (
            (getattr(self.gru, f"weight_{of}_l0").t(), getattr(self.gru, f"bias_{of}_l0")) for of in ("ih", "hh")
        )  # transposed here: a graph has a copy for each transposition
        for step in (self.pos_embedding.weight[:INSTANCES] @ of_input[0] + of_input[1]).unbind():
            reset, update, new = step.chunk(3, dim=-1)
            of_reset, of_update, of_new = (state @ of_state[0] + of_state[1]).chunk(3, dim=-1)
            kept = (update + of_update).sigmoid()
            candidate = (new + (reset + of_reset).sigmoid() * of_new).tanh()
            state = (1 - kept) * candidate + kept * state
            states.append(state)
            state = state if len(states) > 1 else state[:, labels.shape[1] :]
        return torch.cat(states, dim=1)


class Gliner2Head(torch.nn.Module):
    """All layers after the encoder."""

    def __init__(self, settings: Gliner2Settings, size: int) -> None:
        super().__init__()
        self.width = settings.max_width
        self.span_rep = torch.nn.Module()
        self.span_rep.span_rep_layer = SpanMarkers(size)
        self.classifier = _mlp(size, (2 * size,), 1)
        self.count_pred = _mlp(size, (2 * size,), COUNTS)
        self.count_embed = Counting(settings.counting_layer, size)

    def forward(self, features: torch.Tensor, places: Places) -> Scores:
        """Return all logits from the encoder's features of tokens. Spans past a row's last word have the logit 0."""
        words, labels, fields, choices, prompts = (picked(features, part) for part in places)
        markers = cast(SpanMarkers, self.span_rep.span_rep_layer)
        spans = markers.hidden(words, self.width)
        is_span = _inside(places.words, self.width)
        of_labels, of_fields = self.count_embed(labels, fields, places)
        instances = markers.logits(spans, of_fields.flatten(1, 2)) * is_span.unsqueeze(-1)
        return Scores(
            markers.logits(spans, of_labels) * is_span.unsqueeze(-1),
            instances.reshape(*instances.shape[:3], INSTANCES, -1),
            self.count_pred(prompts),
            self.classifier(choices).squeeze(-1),
        )


def _lists(places: Places) -> torch.Tensor:
    """Return the number of each field's list, (rows, fields): how many prompts are before it; 0 for no field."""
    before = (places.prompts.unsqueeze(1) < places.fields.unsqueeze(2)) & (places.prompts > 0).unsqueeze(1)
    return before.sum(dim=2)


def _inside(words: torch.Tensor, width: int) -> torch.Tensor:
    """Return which spans end at a word of their row, (rows, words, width)."""
    ends = torch.arange(words.shape[1]).unsqueeze(1) + torch.arange(width)
    return ends.unsqueeze(0) < (words > 0).sum(dim=1)[:, None, None]


def _mlp(inputs: int, between: tuple[int, ...], outputs: int) -> torch.nn.Sequential:
    """Return linear layers with a ReLU after each but the last."""
    sizes, layers = (inputs, *between), list[torch.nn.Module]()
    for place, size in enumerate(between):
        layers += [torch.nn.Linear(sizes[place], size), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], outputs))


def _encoded(layer: torch.nn.TransformerEncoderLayer, features: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return one layer's features (rows, instances, n, size), with a bias added to the scores of its attention."""
    attention = layer.self_attn
    projected = functional.linear(features, attention.in_proj_weight, attention.in_proj_bias)
    heads = projected.reshape(*projected.shape[:-1], 3, HEADS, -1).movedim(-3, 0).transpose(-3, -2)
    query, key, value = heads.unbind()
    scores = query @ key.transpose(-1, -2) * (SMALL // HEADS) ** -0.5 + bias
    mixed = (scores.softmax(dim=-1) @ value).transpose(-3, -2).flatten(-2)
    features = layer.norm1(features + attention.out_proj(mixed))
    return cast(torch.Tensor, layer.norm2(features + layer.linear2(layer.linear1(features).relu())))
