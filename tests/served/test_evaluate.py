"""`build-repo evaluate` on a real Triton."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.checkpoints.labelled.interval import difference_interval
from builder.checkpoints.metrics import score_similarity
from builder.cli import main
from builder.common.samples import MORE_TEXTS, TEXTS
from builder.repository.check import check
from builder.repository.report.evaluations import read_evaluations
from builder.repository.report.record import read_report
from builder.serving.evaluate.evaluate import beyond_gate, requests_of
from builder.serving.server.triton import TritonServer, running
from tests.models import join
from tests.reports import REPORT

NAMES = ("topics", "pooled", "ranks", "late", "hybrid", "searches", "names", "answers", "writes", "sums", "speaks")
LONG = " ".join(TEXTS)
LISTS = [{"query": TEXTS[i], "positive": MORE_TEXTS[i], "negatives": [*MORE_TEXTS[20:26], LONG]} for i in range(6)]
DATA: Mapping[str, tuple[Sequence[Mapping[str, Any]], str]] = {
    "topics": ([{"text": text, "label": "sport"} for text in (*TEXTS[:20], LONG)], "accuracy"),
    "pooled": ([{"text1": TEXTS[i], "text2": MORE_TEXTS[i], "score": i % 6} for i in range(16)], "Spearman"),
    **dict.fromkeys(("ranks", "late", "hybrid", "searches"), (LISTS, "nDCG@10")),
    "names": (
        [{"tokens": text.split(), "tags": ["B-PER", *"O" * (len(text.split()) - 1)]} for text in TEXTS[:9]],
        "entity F1",
    ),
    "writes": (
        [{"question": TEXTS[i], "choices": list(TEXTS[i + 1 : i + 4]), "answer": i % 3} for i in range(6)],
        "accuracy",
    ),
    **dict.fromkeys(("sums", "speaks"), ([{"text": text, "target": MORE_TEXTS[0]} for text in TEXTS[:6]], "chrF")),
    "answers": ([{"question": "Who?", "context": text, "answers": [text[:9]]} for text in TEXTS[9:19]], "F1"),
}


@pytest.fixture(scope="module")
def own(built: Callable[[str], Path], module_folder: Callable[[str], Path]) -> Path:
    """Return a repository that may be changed, of one model a task."""
    folder = join([built(name) for name in NAMES], module_folder("evaluate") / "model_repository")
    return folder


def _json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def triton(own: Path) -> Iterator[TritonServer]:
    with running(own) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_served_model_has_the_measures_of_pytorch(
    own: Path,
    triton: TritonServer,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    rows, metric = DATA[name]
    data = _json_lines(tmp_path / "data.jsonl", rows)
    command = ["evaluate", name, "--data", str(data), "--url", triton.url, "--repository", str(own)]
    assert main([*command, "--checkpoint", str(checkpoint(name))]) == 0
    assert main([*command, "--checkpoint", str(checkpoint(name))]) == 0
    report = read_report(own, name)
    (record,) = read_evaluations(own, report)
    assert next(iter(record.pytorch)) == metric
    assert record.served == pytest.approx(record.pytorch, abs=1e-6)
    assert record.agreement == pytest.approx(1, abs=1e-5)
    assert record.beyond is None
    assert record.interval.keys() == record.pytorch.keys()
    capfd.readouterr()
    assert main(["report", name, "--repository", str(own), "--output", str(tmp_path / "page.html")]) == 0
    shown = capfd.readouterr().out
    assert all(word in shown for word in ("data.jsonl", metric, "PyTorch", "served"))
    assert check(own) == []


@pytest.mark.slow
def test_retrieval_folder_is_searched_with_the_served_embeddings(
    own: Path, triton: TritonServer, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "qrels").mkdir()
    for file, texts in (("corpus", MORE_TEXTS[:30]), ("queries", TEXTS[:5])):
        lines = [json.dumps({"_id": f"{file[0]}{i}", "text": text}) + "\n" for i, text in enumerate(texts)]
        (tmp_path / f"{file}.jsonl").write_text("".join(lines))
    lines = ["query-id\tcorpus-id\tscore", *(f"q{i}\tc{3 * i}\t1" for i in range(5))]
    (tmp_path / "qrels" / "test.tsv").write_text("\n".join(lines))
    command = ["evaluate", "pooled", "--data", str(tmp_path), "--url", triton.url, "--repository", str(own)]
    assert main([*command, "--checkpoint", str(checkpoint("pooled")), "--limit", "4"]) == 0
    record = read_evaluations(own, read_report(own, "pooled"))[-1]
    assert record.data["count"] == "4 queries, 30 documents"
    assert record.served == pytest.approx(record.pytorch, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["checkpoint", "weights", "task", "data", "empty"])
def test_evaluate_fails_where_nothing_can_be_evaluated(
    own: Path,
    triton: TritonServer,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    case: str,
) -> None:
    before = read_evaluations(own, read_report(own, "ranks"))
    broken: Mapping[str, Sequence[Mapping[str, Any]]] = {"data": LISTS, "empty": [{"text": " ", "label": "food"}]}
    rows = broken.get(case, DATA["topics"][0])
    data = _json_lines(tmp_path / "data.jsonl", rows)
    command = ["evaluate", "topics", "--data", str(data), "--url", triton.url, "--repository", str(own)]
    folder = {"checkpoint": [], "weights": ["--checkpoint", str(checkpoint("flags"))]}
    if case == "task":
        other = tmp_path / "model_repository"
        shutil.copytree(own / "ranks", other / "ranks")
        document = json.loads((other / "ranks" / "build.json").read_text())
        (other / "ranks" / "build.json").write_text(json.dumps({**document, "task": "text-classification"}))
        command[1:2], command[-1] = ["ranks"], str(other)
    here = ["--checkpoint", str(checkpoint("ranks" if case == "task" else "topics"))]
    assert main([*command, *folder.get(case, here)]) == 1
    message = {
        "checkpoint": "--checkpoint FOLDER",
        "weights": "other weights",
        "task": "ranks is for text-classification in the repository",
        "data": "queries with positives and negatives",
        "empty": "none of 1 rows",
    }[case]
    assert message in " ".join(capfd.readouterr().err.split())
    assert read_evaluations(own, read_report(own, "ranks")) == before


def test_rows_of_a_request_share_options_and_sizes() -> None:
    texts = [{"text_input": text} for text in TEXTS[:5]]
    queries = [{**sample, "input_type": "query"} for sample in texts[:2]]
    lists = [{"query": "a", "documents": ["b"] * count} for count in (2, 2, 1)]
    requests = list(requests_of([*queries, *texts, *lists], 4))
    assert [len(request) for request in requests] == [2, 4, 1, 2, 1]
    assert [sample for request in requests for sample in request] == [*queries, *texts, *lists]
    assert [len(request) for request in requests_of(texts, 0)] == [1] * 5, "a model without a batch dimension"


WRITTEN: Mapping[str, tuple[Sequence[Mapping[str, Any]], str]] = {
    "texts": ([{"text": text} for text in (*TEXTS[:6], LONG)], "perplexity"),
    "prompts": ([{"prompt": text, "answer": "x", "max_tokens": 6, "stop": ["q"]} for text in TEXTS[:6]], "exact match"),
    "chats": ([{"messages": [{"role": "user", "content": TEXTS[0]}], "answer": "x", "max_tokens": 6}], "exact match"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITTEN)
def test_decoder_answers_each_kind_of_data_as_pytorch_does(
    own: Path, triton: TritonServer, checkpoint: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    rows, metric = WRITTEN[kind]
    data = _json_lines(tmp_path / f"{kind}.jsonl", rows)
    command = ["evaluate", "writes", "--data", str(data), "--url", triton.url, "--repository", str(own)]
    assert main([*command, "--checkpoint", str(checkpoint("writes"))]) == 0
    record = read_evaluations(own, read_report(own, "writes"))[-1]
    assert next(iter(record.pytorch)) == metric
    assert record.served == pytest.approx(record.pytorch, rel=1e-5)
    assert record.agreement == 1


def test_a_loss_beyond_the_gate_is_named() -> None:
    report = replace(REPORT, threshold=0.99, gate=None)
    assert beyond_gate(report, {"nDCG@10": 0.5}, {"nDCG@10": 0.496}, 1.0, "cosine") is None
    assert "nDCG@10 is 0.4900" in str(beyond_gate(report, {"nDCG@10": 0.5}, {"nDCG@10": 0.49}, 1.0, "cosine"))
    assert "cosine is 0.9000" in str(beyond_gate(report, {"nDCG@10": 0.5}, {"nDCG@10": 0.6}, 0.9, "cosine"))
    assert beyond_gate(report, {"nDCG@10": 0.5}, {"nDCG@10": 0.6}, 0.9, "equal texts") is None
    assert "perplexity is 20.3000" in str(
        beyond_gate(report, {"perplexity": 20.0}, {"perplexity": 20.3}, 1.0, "tokens")
    )
    assert beyond_gate(report, {"perplexity": 20.0}, {"perplexity": 15.0}, 1.0, "tokens") is None
    assert "perplexity is nan" in str(
        beyond_gate(report, {"perplexity": 20.0}, {"perplexity": float("nan")}, 1.0, "tokens")
    )
    labelled = replace(report, gate="share of PyTorch's Spearman")
    assert beyond_gate(labelled, {"Spearman": 0.5}, {"Spearman": 0.5}, 0.9, "cosine") is None


def test_interval_of_a_difference_is_paired() -> None:
    """The interval of a mean covers what the error of the mean of the differences says, however the scores vary."""
    random = np.random.default_rng(1)
    before = random.normal(size=400) * 10
    after = before + 0.5 + random.normal(size=400) * 0.2
    found = difference_interval(lambda values: {"mean": float(np.mean(values))}, list(before), list(after))
    half = 1.96 * 0.2 / 20
    assert found["mean"] == pytest.approx((0.5 - half, 0.5 + half), abs=0.02)
    assert difference_interval(lambda values: {"mean": 1.0}, [1.0], [1.0]) == {}


def test_interval_ignores_draws_without_a_score() -> None:
    """Half of the draws of two pairs have one pair alone, of which Spearman is not defined."""

    def spearman(pairs: Sequence[tuple[float, float]]) -> Mapping[str, float]:
        return score_similarity(*zip(*pairs, strict=True))

    found = difference_interval(spearman, [(1, 0.2), (2, 0.4)], [(1, 0.4), (2, 0.2)])
    assert found == {"Spearman": pytest.approx((-2.0, -2.0))}
    assert difference_interval(spearman, [(1, 0.2), (1, 0.4)], [(1, 0.4), (1, 0.2)]) == {}
