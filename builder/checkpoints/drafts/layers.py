"""Layers of a draft: a token and the hidden states at the token before it in, the next token's logits out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TargetStates:
    """Hidden states of the target that a draft reads of each token.

    `layers`: indices into transformers' `hidden_states` (0: the embeddings), whose states are joined; `projection`: of
    the joined ones, (size, joined size); None: as they are. `shared`: kinds of layers, whose last keys and values
    follow. `size`: the numbers that the draft reads of a token.
    """

    layers: tuple[int, ...]
    size: int
    projection: torch.nn.Linear | None = None
    shared: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, bool]:
        """Return the options with which the target returns them."""
        return {"output_hidden_states": True, **({"return_shared_kv_states": True} if self.shared else {})}

    def of(self, result: Any) -> torch.Tensor:
        """Return them, (batch, sequence, size), of what the target returns with `options`."""
        joined = torch.cat([result.hidden_states[layer] for layer in self.layers], dim=-1)
        read = joined if self.projection is None else self.projection(joined)
        pairs = [tensor for kind in self.shared for tensor in result.shared_kv_states[kind]]
        return torch.cat([read, *(tensor.transpose(1, 2).flatten(2) for tensor in pairs)], dim=-1) if pairs else read


class DraftLayers(torch.nn.Module):
    """Layers of a draft.

    `backbone`: the layers, as a model of transformers without head whose last norm is the identity; it is given
    `combine(embeddings, hidden_states)`, both (batch, sequence, ...). `target_ids`: (rows of `head`,) int64, the
    target's id of each token that the draft knows; None if they are the same. `states`: what it reads of its target.
    `in_place`: True if a token that it proposed runs at the place of the last one, whose keys and values it keeps.
    `own_caches`: (heads, size) of each layer's cache; None: those of `backbone`.
    """

    in_place = False
    own_caches: tuple[tuple[int, int], ...] | None = None

    def __init__(
        self,
        backbone: PreTrainedModel,
        combine: Combine,
        norm: torch.nn.Module,
        head: torch.nn.Module,
        states: TargetStates,
        target_ids: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.combine, self.norm, self.head = backbone, combine, norm, head
        self.states = states
        self.register_buffer("target_ids", target_ids)

    def forward(self, input_ids: torch.Tensor, hidden_states: torch.Tensor, **options: Any) -> BaseModelOutputWithPast:
        """Return what the layers return: its `last_hidden_state` is read together with the next token.

        `input_ids`: (batch, sequence); `hidden_states`: (batch, sequence, size), at the token before each.
        """
        embeddings = self.backbone.get_input_embeddings()(input_ids)
        result: BaseModelOutputWithPast = self.backbone(
            inputs_embeds=self.combine(embeddings, hidden_states), **options
        )
        return result

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that the draft knows, (..., rows of `head`)."""
        return self.head(self.norm(hidden_states))  # type: ignore[no-any-return]

    def following(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what is read together with the next token, of what the layers return."""
        return hidden_states

    def tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the target's id of the most probable token of each row."""
        best = logits.argmax(dim=-1)
        return best if self.target_ids is None else self.target_ids[best]  # type: ignore[index]
