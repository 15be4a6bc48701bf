"""A tiny graph of each kind on the engines of old and new releases, from the cache that scripts/setup fills."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.building.verify.generation import geometry_of
from builder.building.verify.recording import STEPS, Case, Recorder, drive, graph_case, past_the_window, tolerance
from builder.building.verify.runtimes import EngineUnavailable, compare, difference, environment, replayed
from builder.checkpoints.resolve import resolve
from builder.common.errors import ExportError, VerificationError
from builder.common.machine import cpu
from builder.common.releases import NEWEST, OPERATOR_NEEDS, RELEASES, version_tuple
from builder.engines import openvino
from builder.engines.onnxruntime.older import for_runtime, unmarked_windows
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.half_precision import to_half
from builder.engines.optimise.quantisation import quantise
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.export.encoder import export
from builder.graphs.onnx.graph import Graph, check_release, nodes_of, operator_needs, save_graph
from builder.graphs.onnx.likeliest import finding_likeliest
from builder.options import WeightOptions, make_spec
from builder.repository.report.record import EngineCheck
from builder.runtime.contract import LayerShape, Session
from builder.runtime.generation.executors.onnxruntime import InProcess
from tests.decoders import make_decoder
from tests.embedders import make_embedder
from tests.tiny_encoders import VOCABULARY

RUNTIME = Path(__file__).parents[3] / "builder" / "runtime"
IN_PROCESS = RELEASES["24.10"].in_process
DEFAULT_OPENVINO = RELEASES[NEWEST].openvino
VERSIONS = ("1.17.3", "1.19.2", IN_PROCESS, RELEASES[NEWEST].onnxruntime)
PROMPTS = ([5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [20, 21, 22])


@dataclass(frozen=True)
class Kind:
    """Graph with the recorded calls of this build's engine, and their replay on another version."""

    own: Graph
    case: Callable[[Graph], Case]

    def runs_on(self, version: str) -> bool:
        return all(version_tuple(OPERATOR_NEEDS[need]) <= version_tuple(version) for need in operator_needs(self.own))


def _encoder(folder: Path) -> Graph:
    """Return a graph of two products with L2-normalised features, like sentence embeddings."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["hidden"], name="first"),
        helper.make_node("LayerNormalization", ["hidden", "scale"], ["normal"], name="norm"),
        helper.make_node("MatMul", ["normal", "second"], ["features"], name="second"),
        helper.make_node("ReduceL2", ["features", "axes"], ["length"], name="length"),
        helper.make_node("Clip", ["length", "least"], ["bounded"], name="clip"),
        helper.make_node("Div", ["features", "bounded"], ["out"], name="divide"),
    ]
    constants = {
        "first": random.normal(size=(64, 64)).astype(np.float32) / 8,
        "scale": np.ones(64, np.float32),
        "second": random.normal(size=(64, 64)).astype(np.float32) / 8,
        "axes": np.array([-1]),
        "least": np.array(1e-6, np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 64])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["rows", 64])],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return save_graph(onnx.shape_inference.infer_shapes(model), folder / "model.onnx")


def _encoder_case(graph: Graph) -> Case:
    calls = [{"x": np.random.default_rng(rows).normal(size=(rows, 64)).astype(np.float32)} for rows in (1, 5)]
    return graph_case(graph, calls, 1)


def _embedder(folder: Path) -> Kind:
    """Return a decoder that embeds texts, with calls of one row, of padded rows, and of long ones."""
    checkpoint = resolve(make_spec(model=str(make_embedder(folder / "embedder", "qwen3", "lasttoken"))))
    graph = fuse(export(checkpoint, folder).graph, folder)
    calls = []
    for lengths in ((3,), (40, 7, 1), (200, 129)):
        masks = np.array([[int(position < length) for position in range(max(lengths))] for length in lengths])
        ids = np.random.default_rng(len(lengths)).integers(5, VOCABULARY, masks.shape)
        calls.append({"input_ids": ids, "attention_mask": masks})
    return Kind(graph, lambda served: graph_case(served, calls, 1))


def _decoder_case(own: Graph, caches: tuple[LayerShape, ...], remote: bool) -> Callable[[Graph], Case]:
    long = past_the_window(own, list(range(5, 45)), 128)
    executor = InProcess(own.path, geometry_of(caches, 4, len(long) + STEPS, VOCABULARY), Session(threads=1))
    recorder = Recorder(executor)
    drive(executor, PROMPTS, long)
    return lambda served: recorder.case(served.path.name, [served], 1, remote)


@pytest.fixture(scope="module")
def kinds(module_folder: Callable[[str], Path]) -> Mapping[str, Kind]:
    folder = module_folder("kinds")
    exact = _encoder(folder / "fp32")
    encoders = {
        "encoder fp32": exact,
        "encoder fp16": to_half(exact, folder / "fp16" / "model.onnx"),
        "encoder int8": quantise(exact, folder / "int8" / "model.onnx", ()).graph,
    }
    by_name = {name: Kind(graph, _encoder_case) for name, graph in encoders.items()}
    by_name["embedder"] = _embedder(folder)
    for name in ("mistral", "gemma2", "gemma3_text"):
        exported = export_decoder(make_decoder(name, num_hidden_layers=2), folder / name, 128)
        graph = fuse(exported.graph, folder / name)
        by_name[name] = Kind(graph, _decoder_case(graph, exported.caches, False))
        by_name[f"{name} through BLS"] = Kind(graph, _decoder_case(graph, exported.caches, True))
        if name == "mistral":
            graph = finding_likeliest(fuse(exported.graph, folder / "searches"))
            by_name["mistral that searches"] = Kind(graph, _decoder_case(graph, exported.caches, False))
            weights = quantise_weights(graph, "int8-weights", WeightOptions(32, True), folder / name).graph
            by_name["int8-weights"] = Kind(weights, _decoder_case(weights, exported.caches, False))
    return by_name


def _at_hand(version: str, engine: str = "onnxruntime") -> Path:
    try:
        return environment(engine, version)
    except EngineUnavailable as reason:
        pytest.skip(f"{engine} {version} is not in the cache (scripts/setup puts it there): {reason}")


@pytest.mark.parametrize("version", VERSIONS)
def test_served_engine_version_repeats_the_answers(version: str, kinds: Mapping[str, Kind], tmp_path: Path) -> None:
    folder = _at_hand(version)
    able = {name: kind for name, kind in kinds.items() if kind.runs_on(version)}
    cases = {n: k.case(for_runtime(k.own, version, tmp_path / n)) for n, k in able.items()}
    answers = dict(zip(cases, replayed(folder, [case.job for case in cases.values()]), strict=True))
    assert {name: answer for name, answer in answers.items() if isinstance(answer, str)} == {}
    errors = {name: difference(list(case.answers), answers[name], case.by_norm) for name, case in cases.items()}
    assert {name: error for name, error in errors.items() if error > cases[name].tolerance} == {}
    assert len(able) >= (3 if version_tuple(version) < (1, 20) else len(kinds) - 1)
    assert ("embedder" in able) == (version_tuple(version) >= (1, 18))


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "mistral through BLS"])
def test_served_engine_with_a_wider_window_stops_the_build(name: str, kinds: Mapping[str, Kind]) -> None:
    _at_hand(IN_PROCESS)
    kind = kinds[name]
    with pytest.raises(VerificationError, match=rf"onnxruntime {IN_PROCESS}.*differently from this build's.*off by"):
        compare("onnxruntime", IN_PROCESS, "Triton 24.10", lambda: [kind.case(kind.own)])


def test_old_engine_is_wrong_for_several_tokens_after_a_past(kinds: Mapping[str, Kind]) -> None:
    folder = _at_hand("1.19.2")
    llama = kinds["mistral"]
    served = for_runtime(llama.own, "1.19.2", llama.own.path.parent / "old")
    (answers,) = replayed(folder, [llama.case(served).job])
    assert not isinstance(answers, str)
    assert difference(list(llama.case(served).answers), answers) > 0.01


def test_replay_repeats_what_beam_search_reads(kinds: Mapping[str, Kind], tmp_path: Path) -> None:
    """Least probable tokens in place of the most probable ones are detected."""
    kind = kinds["mistral that searches"]
    case = kind.case(kind.own)
    assert [name for name, _ in case.job["calls"]].count("likeliest") == 1
    wrong = onnx.load(kind.own.path)
    (chosen,) = [node for node in nodes_of(wrong.graph) if node.op_type == "TopK"]
    chosen.attribute.append(helper.make_attribute("largest", 0))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    (answers,) = replayed(tmp_path / "this build's own", [{**case.job, "models": [str(tmp_path / "wrong.onnx")]}])
    assert not isinstance(answers, str)
    assert difference(list(case.answers), answers) > 0.1


def test_graph_for_other_engine_versions_does_not_load(kinds: Mapping[str, Kind], tmp_path: Path) -> None:
    lowered = for_runtime(kinds["mistral"].own, IN_PROCESS, tmp_path)
    assert _windows(lowered) == [window - 1 for window in _windows(kinds["mistral"].own)]
    geometry = geometry_of([LayerShape(2, 8)] * 2, 1, 8, VOCABULARY)
    message = r"written for ONNX Runtime a version below 1.24.0, and 1.31.1 reads them otherwise: install what build"
    with pytest.raises(RuntimeError, match=message):
        InProcess(lowered.path, geometry, Session(threads=1))
    with pytest.raises(ExportError, match=r"below 1.24.0.*the Python 3.12 of Triton 26.08 has it"):
        check_release(lowered, "26.08", in_process=True)
    check_release(lowered, "24.10", in_process=True)
    converted = for_runtime(kinds["mistral"].own, "1.28.0", tmp_path)
    assert _windows(converted) == _windows(kinds["mistral"].own)
    InProcess(converted.path, geometry, Session(threads=1))
    with pytest.raises(ExportError, match=r"1.24.0 or later.*the Python 3.10 of Triton 24.10 has it"):
        check_release(converted, "24.10", in_process=True)


def test_graph_without_windows_suits_any_engine_version(kinds: Mapping[str, Kind], tmp_path: Path) -> None:
    graph = kinds["encoder fp32"].own
    assert for_runtime(graph, "1.19.2", tmp_path) is graph


def test_operators_inside_a_branch_count(tmp_path: Path) -> None:
    attention = helper.make_node(
        "GroupQueryAttention", ["x"], ["y"], domain="com.microsoft", num_heads=1, local_window_size=60, softcap=5.0
    )
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    branch = helper.make_graph([attention], "branch", [], [value])
    either = helper.make_node("If", ["which"], ["y"], then_branch=branch, else_branch=branch)
    model = helper.make_model(helper.make_graph([either], "either", [], [value]))
    graph = save_graph(model, tmp_path / "model.onnx")
    assert "GroupQueryAttention with softcap" in operator_needs(graph)
    assert unmarked_windows(graph.path)
    assert len(past_the_window(graph, [5], 128)) > 60
    lowered = for_runtime(graph, "1.19.2", tmp_path)
    assert _windows(lowered) == [59, 59]
    assert not unmarked_windows(lowered.path)


@pytest.fixture(scope="module")
def representation(module_folder: Callable[[str], Path]) -> Graph:
    """Return the encoder for OpenVINO, in the precision that OpenVINO uses on this processor."""
    folder = module_folder("openvino")
    return openvino.convert(_encoder(folder), folder / "model.xml", openvino.arithmetic_on(cpu()["flags"]), False)


def test_setup_installs_the_engine_versions_of_these_tests() -> None:
    installed = (RUNTIME.parents[1] / "scripts" / "setup").read_text()
    assert f"runtimes onnxruntime {' '.join(VERSIONS)} >" in installed
    assert f"runtimes openvino {DEFAULT_OPENVINO} >" in installed


def test_rounded_activations_are_compared_by_norm(kinds: Mapping[str, Kind]) -> None:
    """A single outlier among many rounded values is accepted; a small shift of all values is not."""
    _at_hand(IN_PROCESS)
    case = kinds["encoder int8"].case(kinds["encoder int8"].own)
    assert case.by_norm
    assert not kinds["encoder fp32"].case(kinds["encoder fp32"].own).by_norm
    one = [{"out": values["out"].copy()} for values in case.answers]
    one[0]["out"][0, 0] += 0.09 * np.linalg.norm(one[0]["out"])
    assert compare("onnxruntime", IN_PROCESS, "Triton", lambda: [replace(case, answers=one)]).verified
    wrong = [{"out": values["out"] * 1.5} for values in case.answers]
    with pytest.raises(VerificationError, match=r"off by 3.3e-01 of the norm, at most 2e-01 is right"):
        compare("onnxruntime", IN_PROCESS, "Triton", lambda: [replace(case, answers=wrong)])


@pytest.mark.parametrize(("by_norm", "share"), [(False, 0.08 / 4), (True, 0.08 / 6.5**0.5)])
def test_score_near_zero_is_compared_by_the_scores_of_all_calls(by_norm: bool, share: float) -> None:
    """Regression: one score near zero that was off by 0.08 stopped the build of a reranker with scores up to 4.

    Two versions of OpenVINO, as near to PyTorch, round its activations to bfloat16 at different places.
    """
    expected = [{"logits": np.array([4.0, -3.0, 1.0])}, {"logits": np.array([0.0])}]
    shifted = [{"logits": values["logits"] + 0.08} for values in expected]
    assert difference(expected, shifted, by_norm) == pytest.approx(share)


def test_openvino_model_is_verified_on_its_served_version(representation: Graph) -> None:
    _at_hand(DEFAULT_OPENVINO, "openvino")
    check = compare("openvino", DEFAULT_OPENVINO, "Triton", lambda: [_encoder_case(representation)])
    assert (check.verified, check.calls) == (True, 3), "one row, five rows, and the first of those alone"
    assert check.error is not None
    assert check.error <= tolerance(representation)


def test_different_openvino_answer_stops_the_build(representation: Graph) -> None:
    _at_hand(DEFAULT_OPENVINO, "openvino")
    ours = _encoder_case(representation)
    wrong = replace(ours, answers=[{"out": values["out"] * 1.1} for values in ours.answers])
    with pytest.raises(
        VerificationError, match=rf"openvino {DEFAULT_OPENVINO}.*answers model\.xml differently .*off by"
    ):
        compare("openvino", DEFAULT_OPENVINO, "Triton", lambda: [wrong])
    unread = replace(ours, job={**ours.job, "model": str(representation.path.with_name("absent.xml"))})
    with pytest.raises(VerificationError, match=rf"openvino {DEFAULT_OPENVINO}.*does not run model\.xml: RuntimeError"):
        compare("openvino", DEFAULT_OPENVINO, "Triton", lambda: [unread])


def _windows(graph: Graph) -> list[int]:
    nodes = nodes_of(onnx.load(str(graph.path)).graph)
    return [a.i for node in nodes for a in node.attribute if a.name == "local_window_size" and a.i > 0]


def test_graph_that_the_served_version_computes_wrong_is_refused(kinds: Mapping[str, Kind]) -> None:
    pieces = "uses GroupQueryAttention with several new tokens after a past, which .* computes rightly from 1.20.1 on"
    with pytest.raises(ExportError, match=pieces + r"; Triton 24.10 has 1.19.2. Build for Triton 24.12 or later"):
        check_release(kinds["mistral"].own, "24.10")
    check_release(kinds["mistral"].own, "24.10", in_process=True)
    with pytest.raises(ExportError, match=r"MatMulNBits with 8 bits, which .* from 1.22.0 on; Triton 25.04 has 1.21.0"):
        check_release(kinds["int8-weights"].own, "25.04")


def test_causal_attention_without_a_past_suits_older_engines(kinds: Mapping[str, Kind]) -> None:
    assert operator_needs(kinds["embedder"].own) == ["GroupQueryAttention on CPU"]
    check_release(kinds["embedder"].own, "24.10")


def test_clip_in_half_precision_has_both_bounds(kinds: Mapping[str, Kind]) -> None:
    model = onnx.load(str(kinds["encoder fp16"].own.path))
    (clip,) = [node for node in model.graph.node if node.op_type == "Clip"]
    bounds = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert bounds[clip.input[2]] == np.float16(65504)


def test_report_names_engines_that_were_not_verified_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def never() -> Any:
        raise AssertionError("no call is made for an engine that is not at hand")

    check = compare("onnxruntime", "1.19.2", "the ONNX Runtime of Triton 24.10", never)
    assert check == EngineCheck(
        "onnxruntime", "1.19.2", "the ONNX Runtime of Triton 24.10", False, note="not verified: offline"
    )
    assert str(check) == "not verified: offline on the ONNX Runtime of Triton 24.10, 1.19.2"
    assert str(replace(check, verified=True, note=None, calls=3, error=1e-6)).endswith("(3 calls, off by 1e-06)")


def test_requirements_pin_the_versions_of_the_table() -> None:
    for file, package in (("requirements.txt", "onnxruntime"), ("requirements-gpu.txt", r"onnxruntime-gpu\[.*\]")):
        pinned = dict(
            re.findall(rf'^{package}==([\d.]+); python_version (<|>=) "3.11"$', (RUNTIME / file).read_text(), re.M)
        )
        assert {sign: version for version, sign in pinned.items()} == {
            "<": RELEASES["24.10"].in_process,
            ">=": RELEASES["24.11"].in_process,
        }


def test_gpu_servers_have_the_packages_of_cpu_models() -> None:
    """Regression: one model of OpenVINO kept a server with GPUs from starting, for it had no openvino."""
    packages = [
        {re.split(r"[\[=]", line)[0] for line in (RUNTIME / file).read_text().splitlines() if re.match(r"\w", line)}
        for file in ("requirements.txt", "requirements-gpu.txt")
    ]
    assert packages[1] - packages[0] == {"onnxruntime-gpu"}
    assert packages[0] - packages[1] == {"onnxruntime"}, "the GPU's package has its modules"


def test_newer_containers_decode_with_the_verified_version() -> None:
    import onnxruntime

    assert RELEASES[NEWEST].in_process == onnxruntime.__version__
