"""Tiny assistants of Gemma 4 with random weights, and transformers' own way of asking one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from builder.checkpoints.drafts.assistant import sharing_all

SIZE, CLUSTERS, CHOSEN = 16, 8, 3


def make_assistant(
    folder: Path, target: PreTrainedModel, model_type: str = "gemma4_assistant", ordered: bool = False, **settings: Any
) -> Path:
    """Write an assistant for `target`; return `folder`. `ordered`: it scores the tokens of some clusters alone."""
    text = target.config.get_text_config().to_dict()
    del text["per_layer_config"]
    kinds = ("sliding_attention", "sliding_attention", "full_attention")
    own = {
        "hidden_size": SIZE, "intermediate_size": 24, "layer_types": list(kinds),
        "num_hidden_layers": len(kinds), "num_kv_shared_layers": len(kinds), "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "global_head_dim": 16, **settings,
    }  # fmt: skip
    options = {"backbone_hidden_size": text["hidden_size"], "use_ordered_embeddings": ordered}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        text_config={**text, **own}, num_centroids=CLUSTERS, centroid_intermediate_top_k=CHOSEN, **options
    )
    with sharing_all(config):
        assistant = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
        if ordered:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(text["vocab_size"]))
    assistant.save_pretrained(folder)
    return folder


class Assistant:
    """Assistant in `folder`, asked as SinglePositionMultiTokenCandidateGenerator asks it."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        with sharing_all(target.config):
            self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.target = target

    @torch.no_grad()
    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens after `tokens`; the target has read all of them but the last."""
        read = self.target(
            input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True
        )
        window = self.target.config.get_text_config().sliding_window
        shared = dict(read.shared_kv_states)
        shared["sliding_attention"] = tuple(values[:, :, -window:] for values in shared["sliding_attention"])
        states, position = read.hidden_states[-1][:, -1:], torch.tensor([[len(tokens) - 1]])
        proposed = [tokens[-1]]
        for _ in range(count):
            embedded = self.target.get_input_embeddings()(torch.tensor([proposed[-1:]]))
            answer = self.model(
                inputs_embeds=torch.cat([embedded, states], dim=-1), position_ids=position, shared_kv_states=shared
            )
            proposed.append(int(answer.logits.argmax(dim=-1)))
            states = answer.last_hidden_state
        return proposed[1:]
