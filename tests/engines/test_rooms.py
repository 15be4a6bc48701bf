"""An engine is a package: the families know nothing of it but what is in its folder."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from builder import engines
from builder.building.families import decoder
from builder.building.families.decoder.drafted import draft_spec
from builder.building.variants import candidates
from builder.common.errors import SpecError
from builder.common.memory import Memory
from builder.engines.decoding import ROOM, DecodingEngine, engine_of
from builder.engines.encoding import all_variants, encoding_engine
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.likeliest import OUTPUTS
from builder.options import make_spec
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.candidates import TOP_COUNT
from tests.decoders import make_decoder

LAYERS = [LayerShape(2, 8), LayerShape(2, 16)]
OPTIONS: dict[str, dict[str, Any]] = {
    "onnxruntime": {},
    "openvino": {"engine": "openvino"},
    "cuda": {"target": "cuda", "precision": "fp16"},
}


def engine(name: str, **options: Any) -> DecodingEngine:
    return engine_of(make_spec(model="x", slots=4, machine={"memory_gb": 1}, **OPTIONS[name], **options))


def test_the_rooms_are_the_registry() -> None:
    assert engines.rooms(ROOM) == sorted(OPTIONS)
    for name in engines.rooms(ROOM):
        room = engine(name)  # an abstract method that is left out is a TypeError
        room.refuse()
        assert type(room).__module__ == f"builder.engines.{name}.decoding"


def test_the_family_of_decoders_names_no_engine() -> None:
    for file in Path(decoder.__file__).parent.glob("*.py"):
        imported = [node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        engines_of = {module for module in imported if module and module.startswith("builder.engines")}
        assert engines_of <= {"builder.engines", "builder.engines.decoding", "builder.engines.optimise.quantised"}


def test_the_rooms_of_encoders_say_all_that_can_be_made_of_one() -> None:
    folders = {file.parent.name for file in Path(engines.__file__).parent.glob("*/encoding.py")}
    assert {variant.engine for variant in all_variants()} == folders
    for name in folders:
        room = encoding_engine(name)
        assert room.name == name
        assert {variant.target for variant in room.variants} == set(room.called)
    names = [variant.name for variant in all_variants()]
    assert len(names) == len(set(names)), "a variant is known by its name"


def test_the_variants_of_encoders_name_no_engine() -> None:
    words = {
        node.value
        for node in ast.walk(ast.parse(Path(candidates.__file__).read_text()))
        if isinstance(node, ast.Constant)
    }
    assert not words & {variant.engine for variant in all_variants()}


def test_an_engine_without_a_cache_is_refused() -> None:
    with pytest.raises(SpecError, match="TensorRT has no attention over a cache"):
        engine_of(make_spec(model="x", target="tensorrt"))


@pytest.mark.parametrize(
    ("name", "options", "cache"),
    [
        ("onnxruntime", {}, 4 * 128 * 2 * 2 * (8 + 16) * 4),
        ("onnxruntime", {"cache": "int8"}, 4 * 128 * 2 * 2 * (8 + 16)),
        ("cuda", {}, 4 * 128 * 2 * 2 * (8 + 16) * 2),
        ("openvino", {}, 4 * 128 * 2 * 2 * (8 + 16) * 4),
        ("openvino", {"cache_gb": 0.000_1}, 8 * 32 * 2 * 2 * (8 + 16) * 4),
    ],
)
def test_memory_of_a_cache(name: str, options: dict[str, Any], cache: int) -> None:
    """Two numbers a channel, of 2 heads in two layers; OpenVINO's in whole blocks of 32 tokens."""
    assert engine(name, **options).plan_memory(LAYERS, 1000, 128) == Memory(cache, 1000)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("onnxruntime", {"cache_gb": 1}, "--cache-gb is for --engine openvino"),
        ("openvino", {"executor": "bls"}, "--executor bls is not for decoders with --engine openvino"),
        ("cuda", {"cache": "int8"}, "leave --cache out"),
        ("cuda", {"gpu": {"devices": [0, 1]}}, "one of gpu.devices"),
    ],
)
def test_an_engine_refuses_the_options_that_it_does_not_have(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        engine(name, **options).refuse()


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("onnxruntime", {}, True),
        ("onnxruntime", {"beams": 3}, True),
        ("onnxruntime", {"beams": 1}, False),
        ("onnxruntime", {"executor": "bls"}, False),
        ("cuda", {}, False),
        ("openvino", {}, False),
    ],
)
def test_a_graph_finds_what_searches_read_where_the_loop_runs_it_on_a_cpu(
    name: str, options: dict[str, Any], found: bool, tmp_path: Path
) -> None:
    """Slots are no matter: stages that are kept are for any number of them."""
    exported = export_decoder(make_decoder("gpt2", num_hidden_layers=1), tmp_path, 64).graph
    graph = engine(name, **options).fuse(exported, tmp_path)
    assert (TOP_COUNT in graph.inputs, set(OUTPUTS) <= set(graph.outputs)) == (found, found)


def test_a_draft_searches_nothing() -> None:
    target = make_spec(model="x", draft="y", slots=8)
    assert draft_spec(target, "text-generation", 64).beams == 1
