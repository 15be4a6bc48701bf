"""Layers of GLiNER after the encoder, with the names of its weights: tokens and labels to scores of spans.

Sources: gliner 0.2.29, modeling/base.py (UniEncoderSpanModel, UniEncoderTokenModel), span_rep.py (SpanMarkerV0),
scorers.py, layers.py.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from builder.checkpoints.gliner.settings import SPANS, GlinerSettings
from builder.checkpoints.recurrence import Recurrence


class SpanMarkers(torch.nn.Module):
    """Vectors of spans from those of their first and last words."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.project_start = projection(size, size)
        self.project_end = projection(size, size)
        self.out_project = projection(2 * size, size)

    def forward(self, words: torch.Tensor, width: int) -> torch.Tensor:
        """Return the vectors of spans from each word, of 1 to `width` words: (rows, words, width, size).

        Those that would end after the last word mean nothing.
        """
        starts, ends = self.project_start(words), self.project_end(words)
        ends = ends[:, ends_of_spans(words.shape[1], width)]
        pairs = torch.cat([starts.unsqueeze(2).expand_as(ends), ends], dim=-1)
        return cast(torch.Tensor, self.out_project(pairs.relu()))

    def hidden(self, words: torch.Tensor, width: int) -> torch.Tensor:
        """Return what the last layer of `forward` reads: (rows, words, width, 4 * size).

        The layer before it is linear in the vectors of a span's first and last words: only their sum, and the ReLU
        after it, are computed for each span.
        """
        first = cast(torch.nn.Linear, self.out_project[0])
        of_start, of_end = first.weight.chunk(2, dim=1)
        starts = torch.nn.functional.linear(self.project_start(words).relu(), of_start, first.bias)
        ends = torch.nn.functional.linear(self.project_end(words).relu(), of_end)
        return (starts.unsqueeze(2) + ends[:, ends_of_spans(words.shape[1], width)]).relu()

    def logits(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the products of spans, by their `hidden`, with `labels` (rows, n, size): (rows, words, width, n).

        The last layer is linear too: it is computed for each label instead of each span.
        """
        last = cast(torch.nn.Linear, self.out_project[3])
        logits = hidden.flatten(1, 2) @ (labels @ last.weight).transpose(1, 2) + (labels @ last.bias).unsqueeze(1)
        return logits.reshape(*hidden.shape[:3], -1)


class TokenScorer(torch.nn.Module):
    """Scores of each word for each label: how well an entity of it begins at the word, ends there, or contains it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj_token = torch.nn.Linear(size, 2 * size)
        self.proj_label = torch.nn.Linear(size, 2 * size)
        self.out_mlp = torch.nn.Sequential(
            torch.nn.Linear(3 * size, 4 * size), torch.nn.Identity(), torch.nn.ReLU(), torch.nn.Linear(4 * size, 3)
        )

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, words, labels, 3) from the vectors of words and labels."""
        one, other = self.proj_token(words).unsqueeze(2).chunk(2, dim=-1)
        label, factor = self.proj_label(labels).unsqueeze(1).chunk(2, dim=-1)
        product = other * factor
        return cast(
            torch.Tensor, self.out_mlp(torch.cat([one.expand_as(product), label.expand_as(product), product], -1))
        )


class GlinerHead(torch.nn.Module):
    """All layers after the encoder.

    `words`, `labels` (rows, n): the token that stands for each; 0 fills rows with fewer words.
    """

    def __init__(self, settings: GlinerSettings, encoder_size: int) -> None:
        super().__init__()
        size, self.width = settings.hidden_size, settings.max_width
        self.token_rep_layer = torch.nn.Module()
        if size != encoder_size:
            self.token_rep_layer.projection = torch.nn.Linear(encoder_size, size)
        self.rnn = Recurrence(size, settings.recurrent_layers) if settings.recurrent_layers else None
        if settings.span_mode == SPANS:
            self.span_rep_layer = torch.nn.Module()
            self.span_rep_layer.span_rep_layer = SpanMarkers(size)
            self.prompt_rep_layer = projection(size, size)
        else:
            self.scorer = TokenScorer(size)

    def vectors(
        self, features: torch.Tensor, words: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the vectors of words and of labels, (rows, n, size) each, from the encoder's features of tokens."""
        projected: Any = getattr(self.token_rep_layer, "projection", torch.nn.Identity())(features)
        is_word = words > 0
        of_words = picked(projected, words) * is_word.unsqueeze(-1)
        if self.rnn is not None:
            of_words = self.rnn(of_words, is_word.sum(dim=1))
        return of_words, picked(projected, labels)

    def forward(self, features: torch.Tensor, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return logits as the library computes them: of spans (rows, words, width, labels), or of words.

        Those of words have the shape (rows, words, labels, 3).
        """
        of_words, of_labels = self.vectors(features, words, labels)
        if hasattr(self, "scorer"):
            return cast(torch.Tensor, self.scorer(of_words, of_labels))
        markers: Any = self.span_rep_layer.span_rep_layer
        return torch.einsum("bwkd,bcd->bwkc", markers(of_words, self.width), self.prompt_rep_layer(of_labels))


def projection(inputs: int, outputs: int) -> torch.nn.Sequential:
    """Return two linear layers with a ReLU between them; the third place is of a dropout."""
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 4 * outputs),
        torch.nn.ReLU(),
        torch.nn.Identity(),
        torch.nn.Linear(4 * outputs, outputs),
    )


def ends_of_spans(words: int, width: int) -> torch.Tensor:
    """Return the last word of each span, (words, width), at most the last of the row."""
    return (torch.arange(words).unsqueeze(1) + torch.arange(width)).clamp(max=words - 1)


def picked(features: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the features of the tokens at `places`, (rows, n, size)."""
    return features.gather(1, places.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
