"""Text part of a model that reads images or audio as well: a decoder of its own, over the same weights.

transformers registers such models for AutoModelForMultimodalLM. Their part for text is a model that it has alone too
(Mistral in Mistral 3), or one without a class for its output layer (Qwen-VL's), which gets one here. The whole model's
answers decide which of the two it is. Knows modules and configurations; names no architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from builder.common.errors import CheckpointError, first_line
from builder.common.replaced import replaced

TEXT = "text"
PROBES = 64  # token ids, about
TOLERANCE = 1e-4  # of the largest logit
ELSEWHERE = "vLLM may serve it: --engine vllm"


def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the configuration of the text part of a model that generates text from more; None for other models."""
    if config.is_encoder_decoder or type(config) not in AutoModelForMultimodalLM._model_mapping:
        return None
    part: PreTrainedConfig = config.get_text_config(decoder=True)
    return None if part is config else part


def other_inputs(config: PreTrainedConfig) -> list[str]:
    """Return what the model reads beside text, such as image and audio; nothing for a model of text alone."""
    if type(config) not in AutoModelForMultimodalLM._model_mapping:
        return []
    modalities = AutoModelForMultimodalLM._model_mapping[type(config)].input_modalities
    return [name for name in modalities if name != TEXT] if isinstance(modalities, list | tuple) else []


@contextmanager
def without_missing_libraries(config: PreTrainedConfig) -> Iterator[None]:
    """Create models of `config` without the encoders of other inputs whose libraries are not installed (timm)."""
    part, create = text_config(config), AutoModel.from_config

    def created(config: PreTrainedConfig, **options: Any) -> torch.nn.Module:
        try:
            model: torch.nn.Module = create(config, **options)
        except ImportError:
            if part is None or type(config) is type(part):
                raise
            return torch.nn.Module()
        return model

    with replaced((AutoModel, "from_config", created)):
        yield


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of `model` for text as a causal model over the same weights.

    Raises CheckpointError if `model` has none that answers a text as `model` does. (Without weights nothing answers.)
    """
    name = type(model).__name__
    candidates = list(_candidates(model))
    if not candidates:
        raise CheckpointError(f"the part for text of {name} cannot be told from its other parts. {ELSEWHERE}")
    for part in candidates:
        part.generation_config = model.generation_config
    if next(model.parameters()).is_meta:
        return candidates[0]
    probe = _probe(model.config)
    try:
        expected = _logits(model, probe)
    except Exception as error:  # whatever the model's own code raises
        raise CheckpointError(f"{name} does not answer a text alone: {first_line(error)[:200]}. {ELSEWHERE}") from error
    for part in candidates:
        with suppress(RuntimeError):  # a part whose output is not what the whole model's output layer takes
            if torch.allclose(_logits(part, probe), expected, rtol=0, atol=TOLERANCE * float(expected.abs().max())):
                return part
    raise CheckpointError(
        f"the part for text of {name} answers a text otherwise than the whole model, whose other parts must change "
        f"the answer. {ELSEWHERE}"
    )


def _candidates(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield transformers' own class for the text part, if there is one, and the decoder with the whole's head."""
    config, head, modules = text_config(model.config), model.get_output_embeddings(), list(model.modules())
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is not None:
        yield from (module for module in modules if type(module) is kind)
    if head is None:
        return
    base = next((module for module in modules if getattr(module, "config", None) is config), None)
    if kind is not None:
        with torch.device("meta"):
            shell: PreTrainedModel = kind(config)
        base = next((module for module in modules if type(module) is type(shell.base_model)), None)
        if base is not None:
            setattr(shell, shell.base_model_prefix, base)
            shell.set_output_embeddings(head)
            yield shell.eval()
    if isinstance(base, PreTrainedModel):
        yield _class_with_head(base)(base, head).eval()


class _WithHead(GenerationMixin):  # type: ignore[misc]
    """A decoder with its output layer, as transformers' causal models are."""

    def __init__(self, model: PreTrainedModel, head: torch.nn.Module) -> None:
        super().__init__(model.config)
        self.model, self.lm_head = model, head

    def forward(
        self, input_ids: torch.Tensor | None = None, position_ids: torch.Tensor | None = None, **options: Any
    ) -> CausalLMOutputWithPast:
        result = self.model(input_ids=input_ids, position_ids=position_ids, **options)
        return CausalLMOutputWithPast(logits=self.lm_head(result[0]), past_key_values=result.past_key_values)


def _class_with_head(base: PreTrainedModel) -> Any:
    """Return a class with the abilities of `base`, which transformers reads off a class and its module."""
    parent = next(kind for kind in type(base).__mro__[1:] if issubclass(kind, PreTrainedModel))
    return type(f"{type(base).__name__}ForCausalLM", (_WithHead, parent), {"__module__": type(base).__module__})


def _probe(config: PreTrainedConfig) -> torch.Tensor:
    """Return token ids spread over the vocabulary (1, tokens), none of which stands for an image or ends a text."""
    vocabulary, special = config.get_text_config(decoder=True).vocab_size, set(_special_ids(config.to_dict()))
    step = max(1, vocabulary // PROBES)
    return torch.tensor([[token for token in range(step // 2, vocabulary, step) if token not in special]])


def _special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the token ids that a configuration names, those of its parts included."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special_ids(value)
        elif str(name).endswith(("_token_id", "_token_index")):
            yield from (token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))


def _logits(model: PreTrainedModel, probe: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=probe, use_cache=False).logits
    return logits
