"""Qwen4-Exp: an index over blocks of keys, which chooses all blocks of a short text, and embeddings of n-grams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen4ExpTextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen4_exp import modeling_qwen4_exp
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextAttention,
    Qwen4ExpTextNGramEmbedding,
    Qwen4ExpTextPLELayer,
)

from builder.common.replaced import replaced
from builder.graphs.export.states import causal_convolution, previous_tokens
from builder.runtime.contract import LayerShape

INDEXED = "indexed_attention"


def layers(config: Qwen4ExpTextConfig) -> Iterator[LayerShape]:
    """Yield the keys and values of a layer, or its states: of n-grams, where it has some, and of the delta rule."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
    delta = ((config.linear_conv_kernel_dim - 1, 2 * keys * size + values * value_size), (values, size, value_size))
    before = ((config.ple_conv_kernel_size - 1) * config.ngram_size, config.hc_count * config.hidden_size)
    ngrams: tuple[tuple[int, ...], ...] = (*((1, 1),) * (config.ngram_size - 1), before)
    for number, kind in enumerate(config.layer_types, start=1):
        if kind == INDEXED:
            yield LayerShape(config.num_key_value_heads, config.head_dim)
        else:
            yield LayerShape(0, 0, (*(ngrams if number in config.ple_layer_ids else ()), *delta))


def full_attention_limit(config: Qwen4ExpTextConfig) -> int | None:
    """Return the most tokens of a text in which each attends to all before it."""
    if config.indexer_budget is None or INDEXED not in config.layer_types:
        return None
    return config.indexer_budget + config.indexer_compress_ratio - 1  # the last block is not complete


def prepared(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Run without the positions of all tokens, which transformers keeps in the cache for the indexes."""
    kinds = ["full_attention" if kind == INDEXED else kind for kind in model.config.layer_types]
    return replaced((model.config, "layer_types", kinds))


def _attend(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: Any,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    projected = self.q_proj(hidden_states).unflatten(-1, (-1, 2 * self.head_dim))
    query, gate = projected.chunk(2, dim=-1)
    key, value = (project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
    query, key, value = (heads.transpose(1, 2) for heads in (self.q_norm(query), self.k_norm(key), value))
    query, key = modeling_qwen4_exp.apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = past_key_values.update(key, value, self.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling, **options)
    return self.o_proj((output * torch.sigmoid(gate)).flatten(2)), None


def _embed(self: Any, input_ids: torch.Tensor, past_key_values: Any) -> torch.Tensor:
    """Embed each token's n-grams, of the tokens since the end of a text: ids are counted from that token's id."""
    past_key_values.get_conv_state(self.layer_idx)
    before = (input_ids - self.eos_token_id).float()[..., None]
    tokens, inside = [input_ids], torch.ones_like(input_ids, dtype=torch.bool)
    for _ in range(self.context_len):
        before = previous_tokens(before)
        offset = before[..., 0].round().long()
        inside = inside & (offset != 0)
        tokens.append(torch.where(inside, offset, 0) + self.eos_token_id)
    mixed, found = tokens[0] * self.layer_multipliers[0], []
    for order in range(1, self.ngram_size):
        mixed = torch.bitwise_xor(mixed, tokens[order] * self.layer_multipliers[order])
        heads = slice((order - 1) * self.heads_per_ngram, order * self.heads_per_ngram)
        ids = torch.remainder(mixed[..., None], self.ngram_heads_vocab_sizes[heads])
        found.append(ids + self.ngram_heads_offsets[heads])
    result: torch.Tensor = self.ngram_embedding(torch.cat(found, dim=-1)).flatten(-2)
    return result


def _convolve(self: Any, hidden_states: torch.Tensor, past_key_values: Any) -> torch.Tensor:
    """Convolve (batch, sequence, channels) with zeros between the weights, in place of a dilation."""
    dilation = self.conv1d.dilation[0]
    spread = torch.nn.functional.pad(self.conv1d.weight.squeeze(1)[..., None], (0, dilation - 1)).flatten(1)
    weight = spread[:, : self.short_conv_state_len + 1]
    return causal_convolution(hidden_states.transpose(1, 2), weight, activation="silu").transpose(1, 2)


REPLACED = (
    (Qwen4ExpTextAttention, "forward", _attend),
    (Qwen4ExpTextNGramEmbedding, "forward", _embed),
    (Qwen4ExpTextPLELayer, "_short_conv", _convolve),
)
