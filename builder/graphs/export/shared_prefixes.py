"""Compute the common prefixes of a decoder's rows once: a token's state depends only on the tokens up to it.

Everything but attention is computed for a list of tokens, each once and none of the padding. Attention still reads
whole rows, so its operator is the same as without. Knows tensors and modules; knows no architecture and no task.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from builder.checkpoints.model import is_causal
from builder.checkpoints.tasks.base import TaskGraph
from builder.common.errors import ExportError
from builder.graphs.export.architectures import follows_interface
from builder.graphs.export.attention import causal_attention, refuse_unknown
from builder.graphs.export.masks import Causal, causal_of
from builder.graphs.export.positions import are_close
from builder.graphs.export.rows import Rows

SHARED = "onnxruntime_shared_prefixes"
TOKENS_STEP = 32  # the number of tokens is rounded up to a multiple: OpenVINO prepares itself for each new number
TRIED, SAME = (40, 40, 21), 20  # tokens of rows that are tried, of which the first are equal; above TOKENS_STEP
INPUTS = ("input_ids", "attention_mask")  # a graph with others may tell equal tokens apart


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """Tokens of a call that are computed.

    `kept`: (tokens,) int64, their places in the flattened rows; `source`: (batch, sequence) int64, for each place of
    the rows its token among `kept`.
    """

    kept: torch.Tensor
    source: torch.Tensor

    def in_rows(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states of all places, (batch, sequence, size), of those of the tokens, (1, tokens, size)."""
        return embedding(self.source, states.flatten(0, 1))  # indexing with 0 would copy all states first

    def once(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states of the tokens, (1, tokens, ...), of those of all places, (batch, sequence, ...)."""
        return states.flatten(0, 1).index_select(0, self.kept)[None]


_tokens: ContextVar[SharedTokens] = ContextVar("tokens")


class SharedPrefixes(TaskGraph):
    """`inner`, whose decoder computes equal beginnings of rows once."""

    def __init__(self, inner: TaskGraph) -> None:
        super().__init__(inner.model, inner.inputs, inner.outputs)
        self.inner = inner

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tokens = shared_tokens(tensors["input_ids"], tensors["attention_mask"])
        with _sharing(self.model.base_model, tokens):
            return self.inner.select(tensors)


def shared_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SharedTokens:
    """Find the tokens to compute, for rows that are padded at their end, (batch, sequence) int64 both.

    A place needs no token of its own if an earlier row is equal up to there, or if it is padding, unless the row has
    nothing else. Some get one all the same, so that calls have few numbers of tokens.
    """
    batch, sequence = input_ids.shape
    counts = attention_mask != 0
    ids = torch.where(counts, input_ids, -1)
    differences = (ids[:, None] != ids[None]).to(torch.int32).cumsum(dim=2, dtype=torch.int32)
    rows, places = torch.arange(batch)[:, None], torch.arange(sequence)[None]
    first = torch.where(differences == 0, rows[None], batch).amin(dim=1)  # the first row that is equal up to there
    needed = (first == rows).logical_and(counts.logical_or(places == 0)).flatten()
    spare = (~needed).to(torch.int64).cumsum(dim=0)
    computed = needed.logical_or(spare <= -needed.to(torch.int64).sum() % TOKENS_STEP)
    kept = computed.nonzero()[:, 0]
    # export takes one token for another kind of call; the graph is for any number
    torch._check(kept.shape[0] > 1)  # type: ignore[no-untyped-call]
    order = computed.to(torch.int64).cumsum(dim=0) - 1
    return SharedTokens(kept, embedding(first * sequence + places, order[:, None])[..., 0])


def share_prefixes(module: TaskGraph, rows: Rows) -> SharedPrefixes | None:
    """Return `module` with shared beginnings; None if they could change an answer, as found by trying it."""
    model = module.model
    forward = inspect.signature(model.base_model.forward).parameters
    if module.inputs != INPUTS or "position_ids" not in forward or not is_causal(model) or not follows_interface(model):
        return None
    feeds = rows.feeds(INPUTS, TRIED)
    feeds["input_ids"][1, :SAME] = feeds["input_ids"][2, :SAME] = feeds["input_ids"][0, :SAME]
    tensors = [torch.from_numpy(feeds[name]) for name in INPUTS]
    shared, before = SharedPrefixes(module), model.config._attn_implementation
    try:
        with torch.no_grad():
            expected = module(*tensors)
            model.set_attn_implementation(SHARED)
            tried = shared(*tensors)
    except Exception:  # whatever the model's own code raises
        return None
    finally:
        model.set_attn_implementation(before)
    read = tensors[1] != 0
    pairs = [
        (one[read], other[read]) if one.shape[:2] == read.shape else (one, other)
        for one, other in zip(tried, expected, strict=True)
    ]
    return shared if all(are_close(one, other) for one, other in pairs) else None


@contextmanager
def _sharing(decoder: PreTrainedModel, tokens: SharedTokens) -> Iterator[None]:
    """Run with a decoder that computes `tokens` alone, and returns the states of all places."""

    def flatten(module: Any, arguments: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        input_ids = inputs["input_ids"]
        own = {
            "input_ids": tokens.once(input_ids),
            "attention_mask": torch.ones_like(tokens.kept)[None],
            "position_ids": tokens.once(torch.arange(input_ids.shape[1]).expand_as(input_ids)),
        }
        return arguments, {**inputs, **own}

    def restore(module: Any, arguments: Any, output: Any) -> Any:
        output["last_hidden_state"] = tokens.in_rows(output["last_hidden_state"])
        if output.get("hidden_states") is not None:
            output["hidden_states"] = tuple(tokens.in_rows(states) for states in output["hidden_states"])
        return output

    reset = _tokens.set(tokens)
    try:
        with (
            decoder.register_forward_pre_hook(flatten, with_kwargs=True),
            decoder.register_forward_hook(restore),
        ):
            yield
    finally:
        _tokens.reset(reset)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Causal,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of the tokens as a function of transformers: over whole rows, with every token's keys."""
    refuse_unknown(options)
    tokens, scale = _tokens.get(), query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (_heads_in_rows(tokens, states) for states in (query, key, value))
    if torch.compiler.is_exporting():
        return tokens.once(causal_attention(query, key, value, scale)), None
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return tokens.once(out.transpose(1, 2)), None


def _heads_in_rows(tokens: SharedTokens, states: torch.Tensor) -> torch.Tensor:
    """Return (batch, heads, sequence, size) of the tokens' (1, heads, tokens, size)."""
    _, heads, _, size = states.shape
    rows = tokens.in_rows(states.transpose(1, 2).flatten(2))
    return rows.view(*rows.shape[:2], heads, size).transpose(1, 2)


def _mask(*, mask_function: Any, local_size: int | None = None, **options: Any) -> Causal:
    if causal_of(mask_function) is None or local_size is not None:
        raise ExportError("only rows in which each token sees all those before it share their beginnings")
    return Causal()


AttentionInterface.register(SHARED, _attention)
AttentionMaskInterface.register(SHARED, _mask)
