"""All executors give the same text: with the cache in place, copied by each call, and passed on as handles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.building.verify.emitted import generate
from builder.building.verify.generation import geometry_of
from builder.engines.onnxruntime import open_session, run_with
from builder.engines.optimise.fusion import fuse
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.slots import choose_rows
from builder.runtime.contract import Session
from builder.runtime.generation.executors.base import Executor
from builder.runtime.generation.executors.bls import Bls
from builder.runtime.generation.executors.bls_cuda import BlsCuda
from builder.runtime.generation.executors.onnxruntime import InProcess
from tests.decoders import make_decoder
from tests.graphs.test_decoders import prompts
from tests.tiny_encoders import VOCABULARY


@pytest.mark.parametrize("model_type", ["llama", "bloom", "gemma2", "gemma4_text"])
def test_executors_give_the_same_answers(model_type: str, tmp_path: Path) -> None:
    exported = export_decoder(make_decoder(model_type), tmp_path, 128)
    graph = fuse(exported.graph, tmp_path)
    geometry = geometry_of(exported.caches, 4, 128, VOCABULARY)
    executors = (
        InProcess(graph.path, geometry, Session(threads=1)),
        Bls(run_with(open_session(graph.path, 1)), graph.inputs, geometry),
    )
    in_place, travelling = (generate(executor, prompts(), 32) for executor in executors)
    assert in_place == travelling
    here, there = (executor.arena["key_0"][0, :, :5] for executor in executors)
    np.testing.assert_allclose(here, there, atol=1e-5)


@pytest.mark.parametrize("kind", ["in place", "travelling", "handed on"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_logits_equal_pytorchs_at_all_requested_positions(kind: str, model_type: str, tmp_path: Path) -> None:
    """Run two chunks of a prompt, then a step of three rows, one of them unused."""
    model = make_decoder(model_type)
    exported = export_decoder(model, tmp_path, 64)
    geometry = geometry_of(exported.caches, 3, 64, VOCABULARY)
    executor: Executor
    if kind == "in place":
        executor = InProcess(exported.graph.path, geometry, Session(threads=1))
    elif kind == "travelling":
        executor = Bls(run_with(open_session(exported.graph.path, 1)), exported.graph.inputs, geometry)
    else:
        chosen = choose_rows(exported.graph, tmp_path)
        run = run_with(open_session(chosen.path, 1))
        executor = BlsCuda(lambda feeds, outputs=(): run(feeds), chosen.inputs, chosen.outputs, geometry)

    def expected(tokens: Sequence[int], places: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, places]
        return logits.numpy()

    first, second = prompts()[0], prompts()[2]
    executor.run(0, np.array([first]), np.array([0]))
    executor.run(2, np.array([second[:6]]), np.array([0]))
    logits_positions = np.array([4, 0, 7, 1, 2])  # more than there are slots
    logits = executor.run(2, np.array([second[6:14]]), np.array([6]), logits_positions)
    np.testing.assert_allclose(logits, expected(second, (6 + logits_positions).tolist()), atol=1e-4)
    lengths = np.array([len(first), 0, 14])
    logits = executor.run(0, np.array([[7], [0], [second[14]]]), lengths, np.array([2, 0]))
    np.testing.assert_allclose(logits[0], expected(second, [14])[0], atol=1e-4)
    np.testing.assert_allclose(logits[1], expected([*first, 7], [len(first)])[0], atol=1e-4)


def test_step_writes_one_position_in_place(tmp_path: Path) -> None:
    exported = export_decoder(make_decoder("llama"), tmp_path, 64)
    executor = InProcess(exported.graph.path, geometry_of(exported.caches, 3, 64, VOCABULARY), Session(threads=1))
    executor.run(1, np.array([[5, 6, 7]]), np.array([0]))
    before = {name: tensor.copy() for name, tensor in executor.arena.items()}
    places = {name: tensor.ctypes.data for name, tensor in executor.arena.items()}
    executor.run(1, np.array([[8]]), np.array([3]))
    for name, tensor in executor.arena.items():
        changed = np.argwhere((tensor != before[name]).any(axis=-1))
        assert {(slot, position) for slot, _, position in changed.tolist()} == {(1, 3)}
        assert tensor.ctypes.data == places[name]
