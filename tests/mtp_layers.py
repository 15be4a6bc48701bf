"""Tiny checkpoints with a layer for multi-token prediction after their last, as DeepSeek V3 and GLM-4 MoE have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.decoders import make_decoder_checkpoint


def make_mtp_checkpoint(folder: Path, architecture: str) -> Path:
    """Write a decoder whose extra layer has random weights; return `folder`."""
    make_decoder_checkpoint(folder, architecture)
    config = json.loads((folder / "config.json").read_text())
    layers, size, random = config["num_hidden_layers"], config["hidden_size"], torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    begin, last = f"model.layers.{layers}.", f"model.layers.{layers - 1}."
    extra = {
        name.replace(last, begin): value + 0.1 * torch.randn(value.shape, generator=random)
        for name, value in weights.items()
        if name.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        extra[f"{begin}{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=random)
    extra[f"{begin}eh_proj.weight"] = 0.3 * torch.randn(size, 2 * size, generator=random)
    extra[f"{begin}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    extra[f"{begin}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


class Mtp:
    """transformers' own layer for multi-token prediction, over all tokens of a text at once."""

    def __init__(self, folder: Path) -> None:
        self.target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
        config = self.target.config
        layers = config.num_hidden_layers
        if not hasattr(config, "num_mtp_layers"):  # glm4_moe_lite, which transformers lacks this for
            config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
        # transformers finds the layer by its number in the known checkpoints, which have more layers
        self.target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}.*"]
        self.layer = MtpModel.from_pretrained(self.target).eval()

    @torch.no_grad()
    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Return `count` tokens after `tokens`; the target has read all of them but the last."""
        states = self.target(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
        text = list(tokens)
        for _ in range(count):
            cache = MtpCache(config=self.target.config.get_mtp_config())
            positions = torch.arange(1, len(text))[None]
            returned = self.layer.forward_layer(0, states, positions, cache, input_ids=torch.tensor([text[1:]]))
            text.append(int(self.layer._project_to_logits(returned[:, -1]).argmax()))
            states = torch.cat([states, returned[:, -1:]], dim=1)
        return text[len(tokens) :]


def without(folder: Path, *names: str, **changed: torch.Tensor) -> None:
    """Remove weights of the extra layer by the end of their names, and change others."""
    weights = load_file(folder / "model.safetensors")
    kept: Mapping[str, torch.Tensor] = {
        name: next((value for end, value in changed.items() if name.endswith(end)), value)
        for name, value in weights.items()
        if not name.endswith(names)
    }
    save_file(dict(kept), folder / "model.safetensors", metadata={"format": "pt"})
