"""Plan a model on GPUs: the memory that it takes on each card, and how many instances fit.

Weights and caches are those of the build; CUDA's share is from published measurements. The plan does not include speed,
since none was measured on a GPU, and the plan itself was not tried on one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from builder.common.errors import SpecError
from builder.common.memory import BYTES_PER_VALUE, cache_bytes
from builder.engines import graph_engine
from builder.engines.gpu import CONTEXT, HEADROOM, SERVER_ON_CARD, refuse_card
from builder.options import BuildSpec, Card, Load
from builder.serving.plan.encoder import response_cache
from builder.serving.plan.generating import slot_length
from builder.serving.plan.lines import ModelPlan, PlanLine, megabytes, memory_lines
from builder.serving.plan.needs import ModelNeeds


@dataclass(frozen=True)
class GpuShare:
    """Bytes of a model on a card: for each `instance`, and `once` for all of them together."""

    instance: int
    once: int

    def bytes(self, instances: int) -> int:
        return self.once + instances * self.instance

    def fit(self, card: Card) -> int:
        """Return the number of instances that fit on a card next to the server and nothing else."""
        return max(0, math.floor((usable_bytes(card) - self.once) / self.instance))


def usable_bytes(card: Card) -> float:
    """Return the bytes of a card that models may use, without those of the server."""
    return HEADROOM * card.memory - SERVER_ON_CARD


def plan_on_gpu(spec: BuildSpec, load: Load, needs: ModelNeeds) -> ModelPlan:
    """Plan whether `spec` fits on the cards that it names, and how many instances fit on each card of its machine.

    Raises SpecError if its machine has no card.
    """
    spec = spec.model_copy(update=dict(needs.sized))
    cards, capacity = spec.machine.gpus, spec.capacity
    if not cards:
        raise SpecError(f"{spec.entry_name}: say which cards its machine has (machine: {{gpus: [{{name: l4}}]}})")
    is_encoder = needs.kind == "encoder"  # its engine is a Triton model, whose instances run in the server's process
    instances = spec.instances if is_encoder else 1
    lines = [
        PlanLine("weights", "of an instance", megabytes(needs.weights)),
        PlanLine("activations", needs.activated, megabytes(needs.activations)),
    ]
    share, settings = GpuShare(needs.weights + needs.activations, 0), dict[str, object]()
    if not is_encoder:  # one loop, whose cache is on the card; in process it has a CUDA context of its own
        length, cuda = slot_length(load, needs), CONTEXT if spec.executor == "in-process" else 0
        if spec.cache_gb is None:
            size, cache_lines = _slots(spec, needs, length, share.instance + cuda)
            settings = {"slots": spec.slots, "max_length": length}
        else:
            size, cache_lines = _blocks(spec.target, spec.cache_gb, needs, length)
            settings = {"slots": spec.slots, "cache_gb": spec.cache_gb}
        share = GpuShare(share.instance + size, cuda)
        lines += cache_lines
        lines += [PlanLine("CUDA", "of the loop's own process", megabytes(cuda))] if cuda else []
    for number, card in enumerate(cards):
        rest = f" - {megabytes(share.once)}" if share.once else ""
        used = f"{megabytes(SERVER_ON_CARD)} of the server{rest}"
        formula = f"({HEADROOM} x {megabytes(card.memory)} - {used}) / {megabytes(share.instance)}"
        many = "instances" if is_encoder else "such models"
        lines.append(PlanLine(f"GPU {number} ({card.name})", formula, f"{share.fit(card)} {many} fit"))
    processes = capacity.serving.front_instances or instances
    requests = capacity.max_batch_size if is_encoder else capacity.slots + capacity.serving.queue.size
    request_bytes = capacity.serving.limits.request_bytes
    memory, resident, shared = memory_lines(processes, needs.weights, requests, request_bytes, needs.answer_bytes)
    cache, response_lines = response_cache(load, needs)
    smallest = min((cards[device] for device in spec.gpu.devices), key=lambda card: card.memory)
    of_cards = {"instances": instances, "gpu.devices": list(spec.gpu.devices), "gpu.card": smallest.name}
    cached = {"serving.response_cache": True} if cache else {}
    return ModelPlan(
        capacity.name,
        (*lines, *memory, *response_lines),
        {**of_cards, **settings, **cached},
        resident,
        shared,
        response_cache=cache,
        lacking=tuple(_lacking(spec, share, instances)),
        notes=(needs.measured,),
        gpu_memory=dict.fromkeys(spec.gpu.devices, share.bytes(instances)),
    )


def _slots(spec: BuildSpec, needs: ModelNeeds, length: int, rest: int) -> tuple[int, list[PlanLine]]:
    """Return the bytes of a cache with a slot per sequence, and lines with the number of slots per card."""
    of_slot = cache_bytes(needs.layers, 1, length, BYTES_PER_VALUE[needs.cache])
    formula = f"{spec.slots} slots of {length} tokens x {megabytes(of_slot)}"
    lines = [PlanLine("cache", formula, megabytes(spec.slots * of_slot))]
    for number, card in enumerate(spec.machine.gpus):
        most = max(0, math.floor((usable_bytes(card) - rest) / of_slot))
        formula = f"({megabytes(usable_bytes(card))} - {megabytes(rest)} of the rest) / {megabytes(of_slot)}"
        lines.append(PlanLine(f"most slots, GPU {number} ({card.name})", formula, str(most)))
    return spec.slots * of_slot, lines


def _blocks(target: str, cache_gb: float, needs: ModelNeeds, length: int) -> tuple[int, list[PlanLine]]:
    """Return the bytes of a cache in shared blocks, and lines with the number of longest texts that fit."""
    engine = graph_engine(target)
    block, tokens = engine.block_bytes(needs.layers, needs.cache), engine.block_tokens(needs.layers)
    blocks, of_text = int(cache_gb * 1e9 // block), -(-length // tokens)
    lines = [
        PlanLine("cache", f"{blocks} blocks of {tokens} tokens x {megabytes(block)}", megabytes(blocks * block)),
        PlanLine("longest texts at once", f"{blocks} blocks / {of_text} of {length} tokens", str(blocks // of_text)),
    ]
    return blocks * block, lines


def _lacking(spec: BuildSpec, share: GpuShare, instances: int) -> Sequence[str]:
    found = []
    for device in spec.gpu.devices:
        card = spec.machine.gpus[device]
        try:
            refuse_card(spec.model_copy(update={"gpu": spec.gpu.model_copy(update={"card": card.name})}), spec.runs)
        except SpecError as error:
            found.append(f"GPU {device}: {error}")
        if share.bytes(instances) > usable_bytes(card):
            found.append(
                f"GPU {device} ({card.name}) has room for {megabytes(usable_bytes(card))} of models and this one "
                f"takes {megabytes(share.bytes(instances))}. What helps: a larger card, a lower precision, fewer "
                "instances or slots, or a smaller serving.token_budget"
            )
    return found
