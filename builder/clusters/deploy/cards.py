"""Cards of a replica: whether the models that share one fit into its memory together.

A build knows its own model only: --gpu sizes a decoder's cache for a whole card, and vLLM gives each model the first
cards and a share of their memory (gpu_memory_utilization), whatever else is there. TensorRT-LLM takes a share of what
its weights leave free, so that a second model finds little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.errors import SpecError
from builder.engines.gpu import HEADROOM
from builder.serving.plan.lines import all_gpu_memory, megabytes

if TYPE_CHECKING:
    from builder.clusters.deploy.deployment import Deployment

APART = "or deploy each by itself (--model NAME)"


def refuse_crowded_cards(deployment: Deployment) -> None:
    """Raise SpecError if models that share a card need more memory than it has."""
    for number, size in all_gpu_memory(model.plan for model in deployment.models).items():
        on_it = [model for model in deployment.models if number in model.plan.gpu_memory]
        if len(on_it) < 2:
            continue
        names, share = " and ".join(model.name for model in on_it), sum(model.gpu_share for model in on_it)
        if deployment.runs_checkpoints and not share:
            raise SpecError(
                f"{names} each take most of the memory that is free on card {number} when they start: deploy each by "
                "itself (--model NAME)"
            )
        if share > 1:
            raise SpecError(
                f"{names} take {share * 100:.0f} % of the memory of card {number}: build them with a lower "
                f"vllm.gpu_memory_utilization, {APART}"
            )
        card = deployment.card
        if card is not None and size > (usable := HEADROOM * card.memory_mb * 2**20):
            raise SpecError(
                f"{names} need {megabytes(size)} of card {number} ({card.name}) with the server, and "
                f"{megabytes(usable)} may be used: build them with fewer --slots, a smaller --cache-gb or "
                f"gpu.memory_limit_mb, for a card each (gpu.devices), {APART}"
            )
