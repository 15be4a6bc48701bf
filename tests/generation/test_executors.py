"""Two executors, one loop: the cache in place, and the cache travelling, say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from builder.engines.onnxruntime import infer_with, open_session
from builder.export.decoder import export_decoder
from builder.optimise.fusion import fuse
from builder.runtime.contract import Session
from builder.runtime.generation.executors.base import Executor
from builder.runtime.generation.executors.bls import Bls
from builder.runtime.generation.executors.in_process import InProcess
from builder.verify.generation import generate, geometry_of
from tests.checkpoints import VOCABULARY
from tests.decoders import make_decoder
from tests.export.test_decoders import prompts


@pytest.mark.parametrize("model_type", ["llama", "bloom", "gemma2"])
def test_both_say_the_same(model_type: str, tmp_path: Path) -> None:
    exported = export_decoder(make_decoder(model_type), tmp_path, 128)
    graph = fuse(exported.graph, tmp_path)
    geometry = geometry_of(exported.caches, 4, 128, VOCABULARY)
    executors: list[Executor] = [
        InProcess(graph.path, geometry, Session(threads=1)),
        Bls(infer_with(open_session(graph.path, 1)), graph.inputs, geometry),
    ]
    in_place, travelling = (generate(executor, prompts(), 32) for executor in executors)
    assert in_place == travelling
    copied = [executor.arena["key_0"][0, :, :5] for executor in executors]
    np.testing.assert_allclose(*copied, atol=1e-5)


def test_a_step_writes_one_position_and_moves_nothing(tmp_path: Path) -> None:
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
