"""Rules about machines, releases and builds; those about configurations are in cases.py."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2

from builder.common.cards import GpuModel
from builder.common.hashing import MIN_CACHED_BYTES
from builder.common.machine import VNNI
from builder.repository.config.render import parse
from builder.repository.lint import lint, repository
from builder.repository.lint.findings import Finding, Severity
from builder.repository.lint.rule import all_rules
from builder.repository.lint.rules import instances, memory, provenance
from builder.runtime.contract import DRAFT, Arena, CacheType, LayerShape, Session, dump
from tests.repository.lint.cases import CASES, ONNX, WHOLE, Case
from tests.servings import decoder_serving

ELSEWHERE = {  # the cause of a rule that is neither here nor in a case
    "TR101": "test_foreign.py",
    "TR103": "test_foreign.py",
    "TR109": "test_foreign.py",
    "TR110": "test_foreign.py",
    "TR203": "tests/engines/test_stock.py",
    "TR501": "the same code as TR502",
    "TR601": "tests/repository/test_reproducible.py",
    "TR651": "tests/repository/test_plan.py",
    "TR652": "tests/building/families/test_vllm.py",
    "TR653": "tests/repository/test_plan.py",
    "TR703": "tests/generation/test_chat.py",
    "TR803": "tests/repository/test_report.py",
    "TR804": "tests/repository/test_report.py",
}
HERE = {
    "TR156", "TR312", "TR403", "TR404", "TR405", "TR451", "TR452", "TR605", "TR606", "TR654", "TR655", "TR702", "TR704",
    "TR709", "TR801", "TR802", "TR805", "TR806",
}  # fmt: skip


def test_every_rule_has_a_test_that_breaks_it() -> None:
    tested = {case.code for case in CASES.values()} - {None} | HERE | set(ELSEWHERE)
    assert {rule.code for rule in all_rules()} == tested, "add a case to cases.py, or a test and its code to HERE"


def _found(repository: Path, code: str, triton: str | None = None) -> list[Finding]:
    return [finding for finding in lint(repository, triton) if finding.code == code]


def _write(folder: Path, config: str, files: Mapping[str, str | bytes]) -> None:
    Case(config, None, files).write(folder)


def test_lint_counts_the_threads_of_all_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "available_cores", lambda: 4)
    model = CASES["onnx"].files
    _write(tmp_path / "two_by_itself", 'backend: "onnxruntime"', model)
    _write(tmp_path / "three", ONNX.replace("count: 1", "count: 3").replace('"1"', '"2"'), model)
    _write(tmp_path / "four", ONNX.replace("count: 1", "count: 4"), model)
    for name, graph in (("in_process", "model.onnx"), ("through_bls", None)):
        files = {**CASES["whole"].files, "1/serving.json": dump(decoder_serving(model=graph))}
        _write(tmp_path / name, WHOLE.replace("count: 1", "count: 2"), files)
    assert {finding.model: finding.found for finding in _found(tmp_path, "TR404")} == {
        "two_by_itself": "2 instances of 4 threads each, on 4 cores",
        "three": "3 instances of 2 threads each, on 4 cores",
        "in_process": "2 instances of 4 threads each, on 4 cores",
    }


@pytest.mark.parametrize(("flags", "refused"), [(["avx2"], True), (["avx2", "avx_vnni"], False), ([], False)])
def test_lint_refuses_a_processor_whose_sums_overflow(
    flags: list[str], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was verified with VNNI does not load on x86 without it."""
    monkeypatch.setattr(provenance, "cpu", lambda: {"model": "a CPU", "flags": flags})
    for name, needed in (("rounds", VNNI), ("real", ())):
        files = {**CASES["whole"].files, "1/serving.json": dump(decoder_serving(needs_cpus_with=needed))}
        _write(tmp_path / name, WHOLE, files)
    found = _found(tmp_path, "TR806")
    assert [(finding.model, finding.severity, finding.file) for finding in found] == [
        ("rounds", Severity.ERROR, "rounds/1/serving.json")
    ] * refused


def test_lint_compares_gpus_with_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["whole"].write(tmp_path / "cpu")
    _write(tmp_path / "gpu", WHOLE.replace("KIND_CPU", "KIND_GPU gpus: [ 0 ]"), CASES["whole"].files)
    _write(tmp_path / "second", WHOLE.replace("KIND_CPU", "KIND_GPU gpus: [ 1 ]"), CASES["whole"].files)
    monkeypatch.setattr(instances, "gpus", lambda: (GpuModel("L4", "8.9", 24576),))
    assert [finding.model for finding in _found(tmp_path, "TR403")] == ["second"]
    monkeypatch.setattr(instances, "gpus", lambda: ())
    assert [finding.model for finding in _found(tmp_path, "TR403")] == ["gpu", "second"]


def test_lint_finds_resources_that_are_global_in_one_model_only(tmp_path: Path) -> None:
    for name, scope in (("a", "global: true"), ("b", "")):
        limited = f'rate_limiter {{ resources {{ name: "R" {scope} count: 1 }} }} }}'
        _write(tmp_path / name, WHOLE.replace("KIND_CPU }", f"KIND_CPU {limited}"), CASES["whole"].files)
    assert [finding.model for finding in _found(tmp_path, "TR405")] == ["b"]


def test_lint_counts_the_weights_of_all_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(CASES["onnx"].files["1/model.onnx"])
    _write(tmp_path / "m", ONNX.replace("count: 1", "count: 3"), CASES["onnx"].files)
    monkeypatch.setattr(memory, "total_memory", lambda: 3 * size)
    assert _found(tmp_path, "TR451") == []
    monkeypatch.setattr(memory, "total_memory", lambda: 3 * size - 1)
    assert [finding.model for finding in _found(tmp_path, "TR451")] == ["m"]


@pytest.mark.parametrize(
    ("cache", "read", "of_token"),
    [("float32", 0, 2 * 2 * 8 * 4), ("uint8", 0, 2 * 2 * (8 + 8)), ("float32", 16, 2 * 2 * 8 * 4 + 16 * 4)],
)
def test_lint_counts_the_blocks_that_slots_share_once(
    cache: CacheType, read: int, of_token: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of 2 heads, which a cache of bytes scales, and the hidden states that a draft reads."""
    arena = Arena(slots=100, length=64, dtype=cache, layers=(LayerShape(2, 8),), blocks=3)
    session = Session(engine="openvino")
    files = {**CASES["whole"].files, "1/serving.json": dump(decoder_serving(arena=arena, session=session))}
    if read:
        none = replace(arena, blocks=0)
        draft = decoder_serving(arena=none, session=session, hidden_size=read)
        files[f"1/{DRAFT}/serving.json"] = dump(draft)
    _write(tmp_path / "m", WHOLE, files)
    size = 3 * 32 * of_token  # blocks, their tokens
    monkeypatch.setattr(memory, "total_memory", lambda: size)
    assert _found(tmp_path, "TR451") == []
    monkeypatch.setattr(memory, "total_memory", lambda: size - 1)
    assert len(_found(tmp_path, "TR451")) == 1


def test_lint_warns_of_dockers_default_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["onnx"].write(tmp_path / "onnx")
    room = SimpleNamespace(total=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    assert _found(tmp_path, "TR452") == [], "no model of it is Python"
    CASES["whole"].write(tmp_path / "python")
    assert len(_found(tmp_path, "TR452")) == 1
    room.total = 1 << 30
    assert _found(tmp_path, "TR452") == []


def _graph(node: onnx.NodeProto, half: bool = False, **metadata: str) -> bytes:
    weight = helper.make_tensor("w", TensorProto.FLOAT16 if half else TensorProto.FLOAT, [1], [1.0])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", 4)) for name in "xy")
    body = helper.make_graph([node], "g", [x], [y], [weight])
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(body, opset_imports=domains, ir_version=8)
    helper.set_model_props(model, metadata)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("code", "content", "releases"),
    [
        (
            "TR605",
            _graph(helper.make_node("GroupQueryAttention", ["x"], ["y"], domain="com.microsoft", local_window_size=8)),
            {"24.10": 1, "26.01": 1, "26.02": 0},
        ),
        (
            "TR605",
            _graph(
                helper.make_node("GroupQueryAttention", ["x"], ["y"], domain="com.microsoft", local_window_size=8),
                onnxruntime_below="1.24.0",
            ),
            {"24.10": 0},
        ),
        ("TR606", _graph(helper.make_node("Clip", ["x", "w"], ["y"]), half=True), {"24.10": 1, "24.12": 0}),
        ("TR606", _graph(helper.make_node("Clip", ["x", "w"], ["y"])), {"24.10": 0}),
    ],
)
def test_lint_finds_operators_that_changed_between_releases(
    code: str, content: bytes, releases: dict[str, int], tmp_path: Path
) -> None:
    _write(tmp_path / "m", ONNX, {"1/model.onnx": content})
    assert {release: len(_found(tmp_path, code, release)) for release in releases} == releases


def test_lint_checks_vllm_arguments_against_the_release(tmp_path: Path) -> None:
    arguments = json.dumps({"model": "a/b", "max_num_seq": 8})
    _write(tmp_path / "m", 'backend: "vllm"', {"1/model.json": arguments})
    (finding,) = _found(tmp_path, "TR654", "25.10")
    assert finding.text == "vLLM 0.10.2 has no argument max_num_seq; write max_num_seqs"
    assert len(_found(tmp_path, "TR655")) == 1
    assert _found(tmp_path, "TR654") == [], "of no release nothing is known"


@pytest.mark.parametrize("backend", ["python", "vllm"])
def test_lint_wants_a_queue_for_decoupled_models_before_26_11(backend: str, tmp_path: Path) -> None:
    """Regression: `check` was silent about decoupled models that a burst of requests can crash Triton with."""
    config = f'backend: "{backend}"\nmodel_transaction_policy {{ decoupled: true }}\n'
    for name, text in {
        "direct": config,
        "queued": f"{config}dynamic_batching {{ }}",
        "sequence": f"{config}sequence_batching {{ }}",
        "single_answer": f'backend: "{backend}"',
        "stock": config.replace(backend, "tensorrtllm"),
    }.items():
        _write(tmp_path / name, text, {"1/model.py": ""})
    (finding,) = _found(tmp_path, "TR312", "26.08")
    assert (finding.model, finding.severity) == ("direct", Severity.WARNING)
    assert _found(tmp_path, "TR312") == [], "the release is unknown"


def test_lint_wants_no_queue_from_26_11_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "RELEASES", {"26.10": None, "26.11": None})
    _write(tmp_path / "m", 'backend: "python" model_transaction_policy { decoupled: true }', {"1/model.py": ""})
    assert [len(_found(tmp_path, "TR312", release)) for release in ("26.10", "26.11")] == [1, 0]


@pytest.mark.parametrize(
    ("code", "files"),
    [
        ("TR702", {"1/serving.json": '{"schema": 1}'}),
        ("TR801", {"build.json": "{"}),
        ("TR801", {"build.json": "[]"}),
        ("TR802", {"build.json": '{"files": {"m": {"1/model.py": "00"}}}'}),
        ("TR802", {"build.json": '{"files": {"m": {"1/gone.py": "00"}}}'}),
    ],
)
def test_lint_finds_files_that_differ_from_the_build(code: str, files: dict[str, str], tmp_path: Path) -> None:
    _write(tmp_path / "m", WHOLE, {**CASES["whole"].files, **files})
    assert len(_found(tmp_path, code)) == 1


def test_lint_finds_a_changed_file_with_an_unchanged_time(tmp_path: Path) -> None:
    weights = tmp_path / "m" / "1" / "weights"
    content = b"1" * MIN_CACHED_BYTES
    recorded = {"files": {"m": {"1/weights": hashlib.sha256(content).hexdigest()}}}
    _write(tmp_path / "m", WHOLE, {**CASES["whole"].files, "1/weights": content, "build.json": json.dumps(recorded)})
    assert _found(tmp_path, "TR802") == []
    before = weights.stat()
    weights.write_bytes(b"2" * MIN_CACHED_BYTES)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [finding.file for finding in _found(tmp_path, "TR802")] == ["m/1/weights"]


def test_lint_finds_the_missing_graph_of_a_front(small_repository: Path, tmp_path: Path) -> None:
    front = small_repository / "topics"
    files = {path.relative_to(front).as_posix(): path.read_bytes() for path in front.rglob("*") if path.is_file()}
    del files["1/model.onnx"]
    _write(tmp_path / "topics", files.pop("config.pbtxt").decode(), files)
    assert [finding.file for finding in _found(tmp_path, "TR704")] == ["topics/1/model.onnx"]


def test_lint_checks_signatures_if_a_key_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["whole"].write(tmp_path / "m")
    calls: list[tuple[Path, Path]] = []

    def unsigned(repository: Path, trusted: Path) -> list[str]:
        calls.append((repository, trusted))
        return ["m: it is not signed"]

    monkeypatch.setattr(provenance, "unsigned", unsigned)
    assert _found(tmp_path, "TR805") == []
    (finding,) = (finding for finding in lint(tmp_path, None, tmp_path / "key.pub") if finding.code == "TR805")
    assert (str(finding), calls) == ("m: it is not signed", [(tmp_path, tmp_path / "key.pub")])


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (('name: "x"', 'name: "text"'), ["input text is new", "input x is not there"]),
        (
            ('input { name: "x" data_type: TYPE_FP32', 'input { name: "x" data_type: TYPE_FP16'),
            ["data_type of input x"],
        ),
        (
            ('name: "y" data_type: TYPE_FP32 dims: [ 4 ]', 'name: "y" data_type: TYPE_FP32 dims: [ 5 ]'),
            ["dims of output y"],
        ),
        (("optional: true", "optional: false"), ["optional of input z"]),
        (("max_batch_size: 8", "max_batch_size: 4"), ["max_batch_size is 4"]),
        (("count: 1", "count: 2"), []),
    ],
)
def test_lint_finds_edited_tensors_of_a_built_version(edit: tuple[str, str], found: list[str], tmp_path: Path) -> None:
    """Regression: nothing compared the configuration with the copy that the version keeps."""
    config = WHOLE + 'input { name: "z" data_type: TYPE_FP32 dims: [ 4 ] optional: true }\n'
    edited = config.replace(*edit)
    assert edited != config
    _write(tmp_path / "m", edited, {**CASES["whole"].files, "1/config.pbtxt": config})
    findings = _found(tmp_path, "TR156")
    assert [finding.severity for finding in findings] == [Severity.ERROR] * len(found)
    assert all(text in finding.found for text, finding in zip(found, findings, strict=True)), findings


Edit = Callable[[Any], None]


def _edits(config: model_config_pb2.ModelConfig) -> Iterator[tuple[str, Edit]]:
    """Yield what `check` must say of each edit of the tensors of `config`, with the edit."""
    yield "max_batch_size is 3", lambda edited: setattr(edited, "max_batch_size", 3)
    for kind in ("input", "output"):
        for index, tensor in enumerate(getattr(config, kind)):
            values = {
                "name": "renamed",
                "data_type": model_config_pb2.TYPE_FP64,
                "dims": [*tensor.dims, 7],
                **({"optional": not tensor.optional} if kind == "input" else {}),
            }
            for field, value in values.items():
                found = f"{kind} {tensor.name} is not there" if field == "name" else f"{field} of {kind} {tensor.name}"
                yield found, functools.partial(_set, kind=kind, index=index, field=field, value=value)


def _set(config: model_config_pb2.ModelConfig, kind: str, index: int, field: str, value: Any) -> None:
    tensor = getattr(config, kind)[index]
    if field == "dims":
        tensor.dims[:] = value
    else:
        setattr(tensor, field, value)


@pytest.mark.parametrize("name", ["topics", "flags", "writes"])
def test_lint_finds_every_edited_tensor_of_a_real_repository(
    name: str, built: Callable[[str], Path], tmp_path: Path
) -> None:
    """Edit each tensor of the fronts and engines that a build emitted: in one model, beside an engine, of a decoder."""
    models = shutil.copytree(built(name), tmp_path / "model_repository", copy_function=os.link)
    assert _found(models, "TR156") == []
    (rule,) = (rule for rule in all_rules() if rule.code == "TR156")
    for path in sorted(models.glob("*/config.pbtxt")):
        emitted = path.read_text("utf-8")
        config = parse(emitted, path.parent.name)
        for found, edit in _edits(config):
            edited = model_config_pb2.ModelConfig()
            edited.CopyFrom(config)
            edit(edited)
            path.unlink()
            path.write_text(text_format.MessageToString(edited), "utf-8")
            findings = list(rule.findings(repository.Repository(models)))
            assert found in " ".join(finding.found for finding in findings), f"{path.parent.name}: {found}"
            assert {(finding.model, finding.severity) for finding in findings} == {(path.parent.name, Severity.ERROR)}
        path.write_text(emitted, "utf-8")
    assert _found(models, "TR156") == []


def test_lint_finds_an_unreadable_copy_of_a_configuration(tmp_path: Path) -> None:
    _write(tmp_path / "m", WHOLE, {**CASES["whole"].files, "1/config.pbtxt": "max_batchsize: 8"})
    (finding,) = _found(tmp_path, "TR156")
    assert finding.file == "m/1/config.pbtxt"
