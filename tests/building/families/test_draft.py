"""A decoder with a draft: both are built and verified, and the draft does not change the text."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from builder.building.pipeline import build
from builder.common.cache.entries import CacheEntries
from builder.common.errors import BuilderError, CheckpointError, SpecError
from builder.common.memory import conversion_bytes
from builder.common.progress import Stage
from builder.options import make_spec
from builder.repository.check import check
from builder.repository.report.bom import bom
from builder.repository.report.page import page
from builder.repository.report.record import BuildReport
from builder.runtime.contract import DRAFT, load_generation
from builder.runtime.generation.service import Service
from builder.runtime.generation.stats import Stats
from builder.serving.client.client import Client
from builder.serving.plan.needs import needs_of, published
from builder.serving.server.triton import running
from tests.decoders import make_decoder_checkpoint

LENGTH = 128
TEXTS = ("The museum in Oslo", "Water expands when it freezes, which is why", "My order arrived")


@pytest.fixture(scope="module")
def folder(module_folder: Callable[[str], Path]) -> Path:
    """Create checkpoints with one tokeniser: a target, and a smaller, unrelated draft."""
    folder_of_drafts = module_folder("drafts")
    make_decoder_checkpoint(folder_of_drafts / "large", "llama")
    make_decoder_checkpoint(folder_of_drafts / "small", "gpt2", num_hidden_layers=1)
    return folder_of_drafts


def built(folder: Path, checkpoint: Path, draft: Path, **options: Any) -> BuildReport:
    spec = make_spec(
        model=str(checkpoint), name="writes", draft=str(draft), max_length=LENGTH, output=folder / "repository",
        **{"slots": 8, **options},
    )  # fmt: skip
    return build(spec)


def said(version: Path, **options: Any) -> tuple[list[list[str]], Stats]:
    """Return the answers to TEXTS, which run together until only the last remains, and the loop's counters."""
    service = Service(version)
    answers: dict[str, Any] = {}
    for number, text in enumerate(TEXTS, 1):

        def respond(answer: Any, last: bool, text: str = text) -> None:
            answers[text] = answer if isinstance(answer, Exception) else answer["text_output"].tolist()

        tensors = {"text_input": np.array([text], object)}
        service.submit(tensors, {"max_tokens": 25 * number, "ignore_eos": True, **options}, respond)
    service.loop.run_until_idle()
    return [answers[text] for text in TEXTS], service.loop.stats


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "random_seed": 3},
    {"temperature": 0.8, "random_seed": 4, "n": 2, "top_p": 0.9},
    {"stop_words": ["e"]},
    {"num_beams": 3},
)


@pytest.mark.parametrize(
    ("engine", "precision", "right"),
    [
        ("onnxruntime", "int8", True),
        ("onnxruntime", "fp32", False),
        pytest.param("openvino", "fp32", True, marks=pytest.mark.slow),
    ],
)
def test_draft_leaves_the_text_unchanged(
    engine: str, precision: str, right: bool, folder: Path, tmp_path: Path
) -> None:
    """The draft is the target itself or another model, built in the same precision."""
    draft = folder / ("large" if right else "small")
    judged = {"quality": 0.0, "perplexity": 1e9} if precision == "int8" else {}  # random weights have no quality
    report = built(tmp_path, folder / "large", draft, engine=engine, precision=precision, **judged)
    version, plain = tmp_path / "repository" / "writes" / "1", tmp_path / "plain"
    assert check(tmp_path / "repository") == []
    shutil.copytree(version, plain)
    shutil.rmtree(plain / DRAFT)
    for options in OPTIONS:
        texts, stats = said(version, **options)
        without, alone = said(plain, **options)
        assert texts == without, options
        assert alone.drafted_tokens == 0
        if not options:
            assert stats.drafted_tokens > 0
            assert (stats.right_drafts == stats.drafted_tokens) == right
    guide = json.dumps({"regex": "[0-9]{12}"})
    texts, stats = said(version, guide=guide, ignore_eos=False)
    assert [len(text) for (text,) in texts] == [12] * len(TEXTS)
    assert stats.drafted_tokens == 0
    _check_report(report, draft, version, precision)


@pytest.mark.slow
def test_draft_on_triton_leaves_answers_unchanged_and_counts_tokens(folder: Path, tmp_path: Path) -> None:
    built(tmp_path, folder / "large", folder / "large")
    expected, _ = said(tmp_path / "repository" / "writes" / "1")
    with running(tmp_path / "repository") as server:
        with Client(server.url, "writes") as client:
            answers = [
                client.ask({"text_input": text, "max_tokens": 25 * number, "ignore_eos": True})
                for number, text in enumerate(TEXTS, 1)
            ]
        url = f"http://{server.host}:{server.ports.metrics}/metrics"
        deadline = time.monotonic() + 300  # metrics are published once a second
        while (
            not 0 < _counted(url, "right_drafts") == _counted(url, "drafted_tokens")
        ):  # the draft is the target itself
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert [[text.encode() for text in answer["text_output"]] for answer in answers] == expected


def _counted(url: str, name: str) -> float:
    with urllib.request.urlopen(url, timeout=300) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"build_repo_{name}_total{{"))


def _check_report(report: BuildReport, draft: Path, version: Path, precision: str) -> None:
    """Check the draft in the report, the repository and the plan."""
    files = {name for name in report.files["writes"] if name.startswith(f"1/{DRAFT}/")}
    assert files == {f"1/{DRAFT}/model.onnx", f"1/{DRAFT}/serving.json"}
    assert report.draft is not None
    assert report.draft["checkpoint"]["source"] == draft.name
    assert report.draft["served"]["name"] == report.chosen == precision
    assert precision != "fp32" or report.draft["served"]["quality"] == 1.0
    products = {node.op_type for node in onnx.load(str(version / DRAFT / "model.onnx")).graph.node}
    assert (precision == "int8") == ("MatMulIntegerToFloat" in products)
    assert report.memory is not None
    serving = load_generation(version / DRAFT)
    assert (serving.arena.slots, serving.arena.length) == (4, LENGTH)
    cache = 4 * LENGTH * sum(2 * layer.heads * layer.size * 4 for layer in serving.arena.layers)
    assert report.memory["draft"] == cache + report.draft["served"]["size"]
    assert published(version.parent.parent, "writes").draft == report.memory["draft"]
    assert f"<dt>draft</dt><dd>{draft.name}, {precision}</dd>" in page(report)
    names = [component["name"] for component in json.loads(bom(report))["components"]]
    assert names[:2] == ["large", draft.name]


def test_plan_before_a_build_counts_the_draft(folder: Path, tmp_path: Path) -> None:
    small = make_decoder_checkpoint(tmp_path / "small", "llama", num_hidden_layers=1)
    spec = make_spec(model=str(folder / "large"), max_length=LENGTH, output=tmp_path)
    assert needs_of(spec).draft == 0
    needs = needs_of(spec.model_copy(update={"draft": str(small)}))
    alone = needs_of(make_spec(model=str(small), max_length=LENGTH, output=tmp_path))
    cache = 4 * LENGTH * sum(2 * layer.heads * layer.size * 4 for layer in alone.layers)
    assert needs.draft == alone.weights + cache
    narrow = needs_of(spec.model_copy(update={"draft": str(small), "cache": "int8"}))
    assert narrow.draft == alone.weights + cache // 4 + conversion_bytes(alone.layers, "int8", LENGTH)


def test_cache_keeps_stages_of_target_and_draft_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft added to a built model reuses the cached stages of the model, and caches its own."""
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    build(make_spec(model=str(folder / "large"), name="writes", max_length=LENGTH, slots=8, output=tmp_path / "before"))
    first = built(tmp_path, folder / "large", folder / "small")
    assert first.draft is not None
    assert (list(first.kept), first.draft["kept"]) == (["select"], {})
    again = built(tmp_path / "again", folder / "large", folder / "small", serving={"prefill_tokens": 64})
    assert again.draft is not None
    assert (list(again.kept), list(again.draft["kept"])) == (["select"], ["select"])
    assert again.files["writes"][f"1/{DRAFT}/model.onnx"] == first.files["writes"][f"1/{DRAFT}/model.onnx"]
    assert {entry.model for entry, _ in CacheEntries(tmp_path / "cache").all()} == {"writes", "small"}


def test_draft_build_gives_back_weights_of_both_before_a_stage(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def first_stage(family: Any, context: Any, stage: Stage) -> None:
        given.clear()
        with stage("export"):
            raise BuilderError("enough")

    monkeypatch.setattr("builder.building.pipeline.select_variant", first_stage)
    monkeypatch.setattr("builder.checkpoints.mapped.LARGE", 0)
    monkeypatch.setattr("builder.checkpoints.mapped.MIN_INTERVAL_S", -1)
    monkeypatch.setattr("builder.checkpoints.mapped.give_back", lambda model: given.append(model.config.model_type))
    with pytest.raises(BuilderError, match="enough"):
        built(tmp_path, folder / "large", folder / "small")
    assert sorted(given) == ["gpt2", "llama"]


def test_check_finds_a_removed_or_changed_draft(folder: Path, tmp_path: Path) -> None:
    built(tmp_path, folder / "large", folder / "small")
    beside = tmp_path / "repository" / "writes" / "1" / DRAFT
    (beside / "model.onnx").rename(beside / "other.onnx")
    document = (beside / "serving.json").read_text()
    (beside / "serving.json").write_text(document.replace('"vocabulary"', '"words"'))
    problems = check(tmp_path / "repository")
    assert any("1/draft/model.onnx is missing" in problem for problem in problems)
    assert any("serving.json has an unknown field 'words'" in problem for problem in problems)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "bls"}, r"--draft is not for --executor bls: it runs in process on the CPU"),
        ({"engine": "auto"}, r"--draft is not for --engine auto \(name the engine\)"),
        ({"target": "cuda"}, r"--draft is not for --target cuda"),
        ({"adapters": 2}, r"--draft is not for --adapters: a draft guesses what the model without them says"),
        ({"engine": "vllm", "precision": "fp16"}, r"--draft cannot be used with --engine vllm"),
        ({"machine": {"memory_gb": 0.0003}}, r"caches of the model and its draft need .* \(8 slots of 128 tokens"),
    ],
)
def test_draft_refuses_conflicting_options(options: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        built(tmp_path, folder / "large", folder / "small", **options)
    assert not (tmp_path / "repository" / "writes").exists()


@pytest.mark.parametrize("name", ["topics", "sums"])
def test_draft_is_refused_for_models_that_are_not_decoders(
    name: str, checkpoint: Callable[[str], Path], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match="--draft"):
        build(make_spec(model=str(checkpoint(name)), draft=str(folder / "small"), output=tmp_path))


def _with_another_token(document: dict[str, Any]) -> None:
    vocabulary = document["model"]["vocab"]
    (first, one), (second, two), *_ = sorted(vocabulary.items(), key=lambda entry: -entry[1])
    vocabulary[first], vocabulary[second] = two, one


def _with_fewer_merges(document: dict[str, Any]) -> None:
    document["model"]["merges"].reverse()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_another_token, r"--draft .*: the id of '.+' is \d+, not \d+ .*; a draft has the tokeniser"),
        (_with_fewer_merges, r"--draft .*: its tokenizer.json has another model; a draft has the tokeniser"),
    ],
)
def test_draft_with_other_tokens_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, folder: Path, tmp_path: Path
) -> None:
    draft = Path(shutil.copytree(folder / "small", tmp_path / "draft"))
    document = json.loads((draft / "tokenizer.json").read_text())
    change(document)
    (draft / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=message):
        built(tmp_path, folder / "large", draft)


def test_draft_that_is_too_short_or_not_a_decoder_is_refused(
    folder: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    short = make_decoder_checkpoint(tmp_path / "short", "gpt2", max_position_embeddings=64, n_positions=64)
    with pytest.raises(CheckpointError, match=r"--draft .*short: --max-length 128 exceeds the 64 positions"):
        built(tmp_path, folder / "large", short)
    with pytest.raises(CheckpointError, match="nowhere"):
        built(tmp_path, folder / "large", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"--draft .*topics-checkpoint: "):
        built(tmp_path, folder / "large", checkpoint("topics"))
