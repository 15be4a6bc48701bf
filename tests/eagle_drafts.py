"""Tiny EAGLE-3 drafts from fixed seeds, and EAGLE-3 written down a second time, apart from the build's own layers.

Source: arXiv:2503.01840; https://github.com/SafeAILab/EAGLE, eagle/model/cnets.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

HEADS, KEY_HEADS, HEAD_SIZE, INNER, THETA, EPSILON = 4, 2, 8, 48, 10000.0, 1e-5
Weights = dict[str, torch.Tensor]


def make_eagle3(
    folder: Path, target: PreTrainedModel, known: int = 200, layer: str = "midlayer.", seed: int = 0, **settings: Any
) -> Path:
    """Write a draft with random weights for `target`, which knows `known` of its tokens; return `folder`.

    `layer`: what comes before the names of the layer's weights; `settings`: of config.json, over the usual ones.
    """
    random, config = torch.Generator().manual_seed(seed), target.config
    size, vocabulary = config.hidden_size, config.vocab_size

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * 0.3

    def scales() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=random)

    ids = torch.randperm(vocabulary, generator=random)[:known].sort().values
    weights = {
        f"{layer}input_layernorm.weight": scales(),
        f"{layer}hidden_norm.weight": scales(),
        f"{layer}post_attention_layernorm.weight": scales(),
        f"{layer}self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, 2 * size),
        f"{layer}self_attn.k_proj.weight": matrix(KEY_HEADS * HEAD_SIZE, 2 * size),
        f"{layer}self_attn.v_proj.weight": matrix(KEY_HEADS * HEAD_SIZE, 2 * size),
        f"{layer}self_attn.o_proj.weight": matrix(size, HEADS * HEAD_SIZE),
        f"{layer}mlp.gate_proj.weight": matrix(INNER, size),
        f"{layer}mlp.up_proj.weight": matrix(INNER, size),
        f"{layer}mlp.down_proj.weight": matrix(size, INNER),
        "fc.weight": matrix(size, 3 * size),
        "norm.weight": scales(),
        "lm_head.weight": matrix(known, size),
        "d2t": ids - torch.arange(known),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True),
    }
    document = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size,
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS, "head_dim": HEAD_SIZE, "vocab_size": vocabulary, "draft_vocab_size": known,
        "rms_norm_eps": EPSILON, "rope_theta": THETA, "max_position_embeddings": 64, "hidden_act": "silu",
        "tie_word_embeddings": False, **settings,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(document))
    return folder


class Eagle3:
    """EAGLE-3 over all tokens of a text at once, without a cache."""

    def __init__(
        self, folder: Path, target: PreTrainedModel, layers: tuple[int, ...] = (), before: bool = False
    ) -> None:
        """Read the draft in `folder`. `layers`: of the target that it reads; `before`: norm_before_residual."""
        count = target.config.num_hidden_layers
        self.target, self.layers, self.before = target, layers or (2, count // 2, count - 3), before
        stored = load_file(folder / "model.safetensors")
        self.weights = {name.replace("midlayer.", "layers.0."): value.float() for name, value in stored.items()}
        self.ids = torch.arange(len(stored["d2t"])) + stored["d2t"]

    def train(self, folder: Path, texts: Sequence[Sequence[int]], steps: int = 150) -> None:
        """Let the draft learn the target's next tokens in `texts`, of one length, and write its weights to `folder`.

        A token is learned from the target's hidden states and, as the original does, once from the draft's own.
        """
        trained = {name: value.requires_grad_() for name, value in self.weights.items() if value.is_floating_point()}
        optimizer = torch.optim.Adam(trained.values(), lr=1e-2)
        drafts = {int(token): row for row, token in enumerate(self.ids)}
        states = [self.states(tokens[:-1]) for tokens in texts]
        for step in range(steps):
            tokens = texts[step % len(texts)]
            read = states[step % len(texts)] @ self.weights["fc.weight"].T
            labels = torch.tensor([drafts.get(token, -100) for token in tokens[2:]])
            loss = torch.zeros(())
            for _ in range(2):
                returned = self.layer(self.embedded(tokens[1:]), read)
                loss = loss + torch.nn.functional.cross_entropy(self.logits(returned[:-1]), labels, ignore_index=-100)
                read = torch.cat([read[:1], returned[:-1]])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        save_file({name: value.detach() for name, value in self.weights.items()}, folder / "model.safetensors")

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens after `tokens`; the target has read all of them but the last."""
        read, text = self.read(tokens[:-1]), list(tokens)
        for _ in range(count):
            returned = self.layer(self.embedded(text[1:]), read)
            text.append(int(self.ids[int(self.logits(returned[-1]).argmax())]))
            read = torch.cat([read, returned[-1:]])
        return text[len(tokens) :]

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return what the draft reads of the target's hidden states, (tokens, size)."""
        return self.states(tokens) @ self.weights["fc.weight"].T

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the target's hidden states of the draft's layers, side by side, (tokens, layers * size)."""
        states = self.target(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in self.layers], dim=-1)

    def embedded(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the embeddings of `tokens`, (tokens, size)."""
        shared = self.target.get_input_embeddings().weight.detach()
        return self.weights.get("embed_tokens.weight", shared)[torch.tensor(tokens)]

    def logits(self, returned: torch.Tensor) -> torch.Tensor:
        """Return the logits of the draft's own tokens."""
        return self._normed(returned, "norm") @ self.weights["lm_head.weight"].T

    def layer(self, embeddings: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, (tokens, size)."""
        side_by_side = torch.cat(
            [self._normed(embeddings, "layers.0.input_layernorm"), self._normed(read, "layers.0.hidden_norm")], dim=-1
        )
        query, key, value = (
            self._heads(side_by_side @ self.weights[f"layers.0.self_attn.{name}_proj.weight"].T) for name in "qkv"
        )
        repeated = HEADS // KEY_HEADS
        key, value = (_rotated(key).repeat_interleave(repeated, 0), value.repeat_interleave(repeated, 0))
        scores = _rotated(query) @ key.transpose(1, 2) / HEAD_SIZE**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        joined = attended.transpose(0, 1).reshape(len(read), -1)
        kept = self._normed(read, "layers.0.hidden_norm") if self.before else read
        residual = kept + joined @ self.weights["layers.0.self_attn.o_proj.weight"].T
        normed = self._normed(residual, "layers.0.post_attention_layernorm")
        gate, up, down = (self.weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return residual + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def _normed(self, values: torch.Tensor, name: str) -> torch.Tensor:
        scale = (values.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt()
        return values * scale * self.weights[f"{name}.weight"]

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, (tokens, heads * size), as (heads, tokens, size)."""
        return values.reshape(len(values), -1, HEAD_SIZE).transpose(0, 1)


def _rotated(values: torch.Tensor) -> torch.Tensor:
    """Return `values`, (heads, tokens, size), rotated by their positions (arXiv:2104.09864, halves side by side)."""
    half = HEAD_SIZE // 2
    frequencies = THETA ** (-torch.arange(half) / half)
    angles = torch.arange(values.shape[1])[:, None] * frequencies
    first, second = values[..., :half], values[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
