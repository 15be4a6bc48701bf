"""LoRA adapters in the decode loop: rows with different ones in a batch, and which of them are in the graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from builder.building.adapters import matrices_by_input
from builder.building.verify.generation import generate_with, geometry_of
from builder.checkpoints.linear_layers import linear_layers
from builder.checkpoints.lora import LoraAdapter, merged, read_lora
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.export.lora import AdapterCapacity
from builder.graphs.onnx.graph import Graph
from builder.options import WeightOptions
from builder.runtime.contract import LayerShape, Session
from builder.runtime.generation.beams import BeamSearch
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from builder.runtime.generation.sampling import Sampler
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.sequences import BeamSequence, GeneratedSequence, Request
from builder.runtime.generation.text import StopStrings
from builder.runtime.lora import LORA_A, Adapter
from tests.decoders import make_decoder
from tests.generation.asked import Letters
from tests.lora import save_lora
from tests.tiny_encoders import VOCABULARY

LENGTH = 128
TARGETS = {"llama": ("q_proj", "v_proj", "down_proj"), "gpt2": ("c_attn", "c_proj"), "lfm2": ("in_proj", "q_proj")}


@dataclass(frozen=True)
class Adapted:
    """Model with its fused graph, and two adapters of unequal ranks and layers, as PEFT saved them."""

    model: PreTrainedModel
    graph: Graph
    layers: tuple[LayerShape, ...]
    saved: dict[str, LoraAdapter]

    def executor(self, slots: int = 4) -> InProcess:
        return InProcess(self.graph.path, geometry_of(self.layers, slots, LENGTH, VOCABULARY), Session(threads=1))

    def adapter(self, name: str) -> Adapter | None:
        return Adapter(name, name, matrices_by_input(self.saved[name])) if name else None

    def generated(self, name: str, prompt: list[int], count: int, beams: int = 1) -> list[int]:
        """Return the tokens of transformers, with the adapter merged into the model."""
        settings = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
        if not name:
            tokens = generate_with(self.model, prompt, **settings)
        else:
            with merged(self.model, self.saved[name]):
                tokens = generate_with(self.model, prompt, **settings)
        return [int(token) for token in tokens[0, len(prompt) :]]


def adapt(model_type: str, folder: Path) -> Adapted:
    model, targets = make_decoder(model_type), TARGETS[model_type]
    exported = export_decoder(model, folder, LENGTH, capacity=AdapterCapacity(2, 4))
    layers = linear_layers(model)
    saved = {
        "a": read_lora(str(save_lora(folder / "a", model, targets, rank=2, seed=1)), layers, 4),
        "b": read_lora(str(save_lora(folder / "b", model, targets[:1], rank=4, seed=2, use_rslora=True)), layers, 4),
        "c": read_lora(str(save_lora(folder / "c", model, targets[1:], rank=3, seed=3)), layers, 4),
    }
    return Adapted(model, fuse(exported.graph, folder), exported.caches, saved)


@pytest.fixture(scope="module", params=TARGETS)
def adapted(request: pytest.FixtureRequest, module_folder: Callable[[str], Path]) -> Adapted:
    return adapt(request.param, module_folder(request.param))


@pytest.fixture(scope="module")
def llama(module_folder: Callable[[str], Path]) -> Adapted:
    return adapt("llama", module_folder("llama"))


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, VOCABULARY, length)]


def loop_of(executor: InProcess, reuse: bool = True) -> DecodeLoop:
    return DecodeLoop(executor, SchedulerLimits(queue=100, prefill_tokens=16), reuse)


def begin(
    loop: DecodeLoop, prompt: list[int], adapter: Adapter | None, count: int = 12, beams: int = 1
) -> GeneratedSequence | BeamSequence:
    """Submit a greedy request, or a search, with `adapter`."""
    rules = Rules(RequestOptions(temperature=0.0, num_beams=beams), max_tokens=count)
    fail: Callable[[Exception], None] = pytest.fail  # type: ignore[assignment]
    request = Request(prompt, rules.options, count, lambda piece: None, fail, adapter=adapter)
    text: Any = Letters()
    sequence: GeneratedSequence | BeamSequence
    if beams > 1:
        sequence = BeamSequence(request, BeamSearch(rules, prompt, frozenset()), lambda: text)
    else:
        sequence = GeneratedSequence(request, Sampler(rules, 0, prompt), text, StopStrings(()), frozenset())
    loop.submit([sequence])
    return sequence


def said(sequence: GeneratedSequence | BeamSequence) -> list[int]:
    if isinstance(sequence, BeamSequence):
        return list(sequence.search.ended[0].tokens)
    return list(sequence.sampler.generated)


def test_adapters_answer_alone_like_merged_weights(adapted: Adapted) -> None:
    loop = loop_of(adapted.executor())
    prompts = [tokens_of(length, length) for length in (1, 5, 20)]
    answers = {name: [adapted.generated(name, prompt, 12) for prompt in prompts] for name in ("", "a", "b")}
    assert answers[""] != answers["a"] != answers["b"] != answers[""]
    for name, expected in answers.items():
        for prompt, tokens in zip(prompts, expected, strict=True):
            sequence = begin(loop, prompt, adapted.adapter(name))
            loop.run_until_idle()
            assert said(sequence) == tokens


def test_adapters_answer_mixed_in_a_batch_that_others_join_and_leave(adapted: Adapted) -> None:
    """Ten requests over four slots; the base and two adapters begin and end at different steps."""
    loop, names = loop_of(adapted.executor()), ["", "a", "b", "a", "", "b", "b", "a", "", ""]
    asked = []
    for index, name in enumerate(names):
        prompt, count = tokens_of(3 + 5 * (index % 4), index), 4 + 3 * (index % 5)
        asked.append((name, prompt, count, begin(loop, prompt, adapted.adapter(name), count)))
        loop.step()
    loop.run_until_idle()
    for name, prompt, count, sequence in asked:
        assert said(sequence) == adapted.generated(name, prompt, count)


def test_adapters_search_with_beams_beside_other_rows(llama: Adapted) -> None:
    loop, prompt = loop_of(llama.executor()), tokens_of(7)
    searched = begin(loop, prompt, llama.adapter("a"), beams=2)
    other = begin(loop, prompt, llama.adapter("b"))
    loop.run_until_idle()
    assert said(searched) == llama.generated("a", prompt, 12, beams=2)
    assert said(other) == llama.generated("b", prompt, 12)


def test_drafts_of_the_base_leave_the_tokens_of_an_adapter(llama: Adapted) -> None:
    loop = DecodeLoop(llama.executor(), SchedulerLimits(queue=9, prefill_tokens=16), draft=llama.executor(2))
    for name in ("a", "", "b"):
        prompt = tokens_of(9, 4)
        sequence = begin(loop, prompt, llama.adapter(name), 24)
        loop.run_until_idle()
        assert said(sequence) == llama.generated(name, prompt, 24)
    assert loop.stats.drafted_tokens > loop.stats.right_drafts > 0


def test_prefixes_are_reused_by_the_same_adapter_alone(llama: Adapted) -> None:
    loop, prompt = loop_of(llama.executor(2)), tokens_of(20)
    reused = []
    for name in ("", "a", "b", "a", "b"):
        before, sequence = loop.stats.reused_tokens, begin(loop, prompt, llama.adapter(name), 8)
        loop.run_until_idle()
        reused.append(loop.stats.reused_tokens - before)
        assert said(sequence) == llama.generated(name, prompt, 8)
    assert reused == [0, 0, 0, 19, 19]


def test_moved_slots_keep_their_adapters(llama: Adapted) -> None:
    """The first sequences end, and those after them move into their slots."""
    loop = loop_of(llama.executor())
    asked = [(name, tokens_of(6, index)) for index, name in enumerate(("", "a", "b", "a"))]
    counts = (2, 3, 20, 20)
    sequences = [begin(loop, p, llama.adapter(n), c) for (n, p), c in zip(asked, counts, strict=True)]
    loop.run_until_idle()
    for (name, prompt), count, sequence in zip(asked, counts, sequences, strict=True):
        assert said(sequence) == llama.generated(name, prompt, count)


def test_an_adapter_waits_while_others_need_all_rows(llama: Adapted) -> None:
    """A third adapter starts when one of two has no sequence left; later requests do not overtake it."""
    loop, prompt = loop_of(llama.executor()), tokens_of(5)
    first, second = (begin(loop, prompt, llama.adapter(name), 6) for name in ("a", "b"))
    loop.step()
    third, later = begin(loop, prompt, llama.adapter("c"), 6), begin(loop, prompt, llama.adapter("a"), 6)
    loop.step()
    assert not third.slots
    assert not later.slots
    loop.run_until_idle()
    for name, sequence in (("a", first), ("b", second), ("c", third), ("a", later)):
        assert said(sequence) == llama.generated(name, prompt, 6)


@pytest.mark.parametrize(("precision", "error"), [("int8", 0.2), ("int8-weights", 0.2), ("int4-weights", 0.7)])
def test_adapters_run_beside_quantised_weights(llama: Adapted, precision: str, error: float, tmp_path: Path) -> None:
    """Compare how an adapter changes logits with fp32: off by at most `error` of the size of the change."""
    graph = quantise_weights(llama.graph, precision, WeightOptions(32, symmetric=True), tmp_path).graph
    changes = []
    for served in (llama.graph, graph):
        executor = Adapted(llama.model, served, llama.layers, llama.saved).executor(2)
        assert executor.lora is not None
        executor.lora.rows[1] = executor.lora.activate(llama.adapter("a"), ())
        for slot in (0, 1):
            executor.run(slot, np.array([tokens_of(9)]), np.array([0]))
        base, changed = executor.run(0, np.array([[7], [7]]), np.array([9, 9]))
        changes.append(changed - base)
    assert np.linalg.norm(changes[1] - changes[0]) < error * np.linalg.norm(changes[0])


def test_activating_an_adapter_clears_the_one_before(llama: Adapted) -> None:
    """The new adapter has a lower rank than the stacks, and other layers than the adapter that had it."""
    executor = llama.executor(1)
    stacks = executor.lora
    assert stacks is not None
    for name in ("a", "b"):
        assert stacks.activate(llama.adapter(name), ()) in (1, 2)
    row = stacks.activate(llama.adapter("c"), {"b"})
    assert row is not None
    for name, tensor in stacks.tensors.items():
        matrix = llama.adapter("c").matrices.get(name)  # type: ignore[union-attr]
        expected = np.zeros_like(tensor[row])
        if matrix is not None:
            expected[: matrix.shape[0], : matrix.shape[1]] = matrix
        np.testing.assert_array_equal(tensor[row], expected)
    assert stacks.activate(llama.adapter("a"), {"b", "c"}) is None
    assert not any(tensor[0].any() for tensor in stacks.tensors.values()), "row 0 is no adapter"


def test_adapters_may_change_some_layers_alone(tmp_path: Path) -> None:
    model, capacity = make_decoder("llama"), AdapterCapacity(1, 4, ("q_proj", "up_proj"))
    graph = export_decoder(model, tmp_path, LENGTH, capacity=capacity).graph
    changed = {name.removeprefix(LORA_A) for name in graph.inputs if name.startswith(LORA_A)}
    ends = ("self_attn.q_proj", "mlp.up_proj")
    assert changed == {f"model.layers.{layer}.{end}" for layer in (0, 1) for end in ends}
    assert capacity.bytes(model) == 4 * 3 * 4 * 2 * ((32 + 32) + (32 + 64))


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.layers.9.mlp.up_proj", (32, 2), "changes model.layers.9.mlp.up_proj, which adapters of this version"),
        ("model.layers.0.mlp.up_proj", (16, 2), "has 16 numbers, and that of this version has 32"),
        ("model.layers.0.mlp.up_proj", (32, 9), "rank 9 in model.layers.0.mlp.up_proj, .* at most 4"),
    ],
)
def test_stacks_say_why_an_adapter_does_not_fit(llama: Adapted, name: str, shape: tuple[int, int], reason: str) -> None:
    stacks = llama.executor(1).lora
    assert stacks is not None
    misfit = stacks.misfit(Adapter("x", "x", {f"{LORA_A}{name}": np.zeros(shape, np.float32)}))
    assert misfit is not None
    assert re.search(reason, misfit)
