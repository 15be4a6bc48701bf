"""Each engine is a package, and model families contain no code of an engine."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder import engines
from builder.building.families import decoder
from builder.building.families.decoder.drafted import draft_spec
from builder.common.engines import ENGINES
from builder.common.errors import SpecError
from builder.common.memory import ReservedMemory
from builder.engines.cuda.eight_bit import rounded_to_bytes
from builder.engines.decoding import DecodingEngine, decoding_engines, engine_of
from builder.engines.encoding import all_variants
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.likeliest import OUTPUTS
from builder.options import make_spec
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import TOP_COUNT
from tests.decoders import make_decoder

LAYERS = [LayerShape(2, 8), LayerShape(2, 16)]
OPTIONS: dict[str, dict[str, Any]] = {
    "onnxruntime": {},
    "openvino": {"engine": "openvino"},
    "cuda": {"target": "cuda", "precision": "fp16"},
}


def engine(name: str, **options: Any) -> DecodingEngine:
    return engine_of(make_spec(model="x", slots=4, machine={"memory_gb": 1}, **OPTIONS[name], **options))


def test_each_engine_is_a_package_with_facts_and_a_class() -> None:
    folders = {file.parent.name for file in Path(engines.__file__).parent.glob("*/engine.py")}
    assert {name.replace("-", "_") for name in ENGINES} == folders
    whole = [engines.checkpoint_engine(name) for name, facts in ENGINES.items() if facts.runs_checkpoint]
    for one in (*engines.graph_engines(), *whole):
        assert one.facts is ENGINES[one.name]
        assert type(one).__module__ == f"builder.engines.{one.name.replace('-', '_')}.engine"


def test_decoding_engines_are_the_packages_with_a_decoding_module() -> None:
    assert sorted(decoding_engines()) == sorted(OPTIONS)
    for name in decoding_engines():
        decoding = engine(name)  # a missing abstract method raises TypeError
        decoding.refuse()
        assert type(decoding).__module__ == f"builder.engines.{name}.decoding"


def test_decoder_family_imports_no_engine() -> None:
    for file in Path(decoder.__file__).parent.glob("*.py"):
        imported = [node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        engines_of = {module for module in imported if module and module.startswith("builder.engines")}
        assert engines_of <= {"builder.engines", "builder.engines.decoding", "builder.engines.optimise"}


def test_encoding_engines_have_a_title_for_each_target_of_their_variants() -> None:
    folders = {file.parent.name for file in Path(engines.__file__).parent.glob("*/encoding.py")}
    requested = {folder for folder in folders if ENGINES[folder].targets}
    assert {variant.engine for variant in all_variants()} == requested, "tables have the others"
    for one in engines.graph_engines():
        if one.encoding is not None:
            assert one.encoding.name == one.name
            assert {variant.target for variant in one.encoding.variants} == set(one.encoding.titles)
    names = [variant.name for variant in all_variants()]
    assert len(names) == len(set(names)), "a variant is identified by its name"


def test_engine_of_refuses_an_engine_without_a_cache() -> None:
    with pytest.raises(SpecError, match="TensorRT has no attention over a cache"):
        engine_of(make_spec(model="x", target="tensorrt"))


def test_cuda_multiplies_many_rows_by_packed_weights_where_the_package_can() -> None:
    """Regression: a prompt, and more than 16 rows, first unpacked every matrix to half precision."""
    allowed = {"ep.cuda.fpa_intb_gemm": "1"}
    small = [make_spec(model="x", target="cuda", precision=precision) for precision in ("int4-weights", "int8-weights")]
    assert [engine_of(spec).session().entries for spec in small] == [allowed, allowed]
    assert engine("cuda").session().entries == {}
    older = small[0].model_copy(update={"triton": "24.10"})
    assert engine_of(older).session().entries == {}, "onnxruntime-gpu 1.23.2 lacks it"
    matrix = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    assert rounded_to_bytes(matrix).size == 32, "larger blocks are not taken"


@pytest.mark.parametrize(
    ("name", "options", "cache", "conversion"),
    [
        ("onnxruntime", {}, 4 * 128 * 2 * 2 * (8 + 16) * 4, 0),
        ("onnxruntime", {"cache": "int8"}, 4 * 128 * 2 * 2 * (8 + 16), 5 * 128 * 2 * 16 * 4),
        ("cuda", {}, 4 * 128 * 2 * 2 * (8 + 16) * 2, 0),
        ("openvino", {}, 4 * 128 * 2 * 2 * (8 + 16) * 4, 0),
        ("openvino", {"cache_gb": 0.000_1}, 8 * 32 * 2 * 2 * (8 + 16) * 4, 0),
        ("openvino", {"cache": "int8", "cache_gb": 0.000_1}, 19 * 32 * 2 * 2 * (8 + 16 + 2 * 8), 0),
    ],
)
def test_plan_memory_counts_the_cache_and_what_prompts_convert(
    name: str, options: dict[str, Any], cache: int, conversion: int
) -> None:
    """A key and a value per channel of 2 heads in two layers; OpenVINO rounds up to blocks of 32 tokens.

    Prompts over ONNX Runtime's int8 cache convert the keys and values of a layer at once.
    """
    memory = engine(name, **options).plan_memory(LAYERS, 1000, 128)
    assert memory == ReservedMemory(cache, 1000, conversion=conversion)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("onnxruntime", {"cache_gb": 1}, "--cache-gb is for --engine openvino"),
        ("openvino", {"executor": "bls"}, "--executor bls is not for decoders with --engine openvino"),
        ("cuda", {"cache": "int8"}, "leave --cache out"),
        ("cuda", {"gpu": {"devices": [0, 1]}}, "one of gpu.devices"),
    ],
)
def test_decoding_engine_refuses_options_that_it_lacks(name: str, options: dict[str, Any], problem: str) -> None:
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
def test_graph_finds_the_likeliest_tokens_if_the_loop_runs_it_on_a_cpu(
    name: str, options: dict[str, Any], found: bool, tmp_path: Path
) -> None:
    """The number of slots does not matter: cached stages are for any number of them."""
    exported = export_decoder(make_decoder("gpt2", num_hidden_layers=1), tmp_path, 64).graph
    graph = engine(name, **options).fuse(exported, tmp_path)
    assert (TOP_COUNT in graph.inputs, set(OUTPUTS) <= set(graph.outputs)) == (found, found)


def test_draft_has_one_beam() -> None:
    target = make_spec(model="x", draft="y", slots=8)
    assert draft_spec(target, "text-generation", 64).beams == 1
