"""Versions on a real Triton: changed under load, tried beside one another, refused."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.checkpoints.tasks import find_task
from builder.checkpoints.tasks.base import EncoderTask
from builder.cli import main
from builder.repository import versions
from builder.repository.publish import publish
from builder.serving.client.client import Client
from builder.serving.client.samples import samples_for
from builder.serving.promotion import canary, promote
from builder.serving.promotion.promote import (
    ROUNDS,
    OutputMatch,
    PromotionLimits,
    PromotionTrial,
    TriedVersion,
    compare,
    same_tokens,
)
from builder.serving.server.control import Control
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import TritonServer, free_ports, running
from scripts.benchmarks.publish import Pair, measure, pairs
from tests.versions import copy_version


@pytest.fixture(scope="module")
def builds(module_folder: Callable[[str], Path]) -> Mapping[str, Pair]:
    """Return two builds of each model of the benchmark, to be published under one name."""
    return pairs(module_folder("builds"))


@pytest.mark.slow
def test_version_changes_under_load_fail_no_request(
    builds: Mapping[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a small version of the benchmark: encoders in process and behind BLS, and streams."""
    monkeypatch.setattr(versions, "OVERLAP_S", 0)
    options = argparse.Namespace(requests=300, changes=1, seconds=900, clients=2, streams=2)
    figures = measure(tmp_path / "repository", builds, options)
    assert (figures["failed"], figures["wrong"]) == (0, 0), figures["failures"]
    assert figures["changes"] == 6
    for name, model in figures["models"].items():
        assert min(model["of_each_build"]) > 0, f"{name} was answered by one version only"


def test_front_and_engine_with_new_tensors_switch_together(
    built: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve the repository as a command killed right before, or right after, the switch leaves it."""
    mine, between = tmp_path / "model_repository", tmp_path / "between" / "model_repository"
    shutil.copytree(built("flags"), mine, copy_function=os.link)
    copy_version(mine, "flags", 2)
    _edit(mine / "flags_model" / "2" / "config.pbtxt", "max_batch_size: 64", "max_batch_size: 16")
    _edit(mine / "flags" / "2" / "serving.json", '"rude"', '"rude, says version 2"')
    replace, moments = os.replace, list[str]()

    def noting(source: Path, target: Path) -> None:
        if target == mine / "flags" / versions.CHANGING / "now":
            shutil.copytree(mine, between, symlinks=True, copy_function=os.link)
            moments.append(os.readlink(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", noting)
    versions.rollback(mine, "flags", 2)
    monkeypatch.undo()
    asked = {"text_input": "you are a fool", "top_k": 3}
    names = ("flags", "flags_model")
    with running(between) as server, Control(server.url, between) as control, Client(server.url, "flags") as client:
        assert [control.versions(name) for name in names] == [{1}, {1}]
        assert "rude" in client.ask(asked)["label"]
        for name in names:
            control.unload(name)
        link = between / "flags" / versions.CHANGING / "now"
        link.with_name("next").symlink_to(moments[0])
        replace(link.with_name("next"), link)
        for name in reversed(names):
            control.load(name)
        assert [control.versions(name) for name in names] == [{2}, {2}]
        assert "rude, says version 2" in client.ask(asked)["label"]


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")


@pytest.mark.slow
def test_canary_rolls_back_failing_or_slow_versions(
    builds: Mapping[str, Pair],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Send requests through a gateway while failing, slow and good canaries get half of them.

    The trial on samples is skipped. A canary ends as soon as its version does worse, so
    the two bad ones have no time limit; the good one is watched for 60 answers.
    """
    monkeypatch.setattr(versions, "OVERLAP_S", 0)
    monkeypatch.setattr(canary, "MIN_REQUESTS", 6)
    monkeypatch.setattr(
        promote,
        "compare",
        lambda *arguments: PromotionTrial(TriedVersion(1, [1.0]), TriedVersion(2, [1.0]), [OutputMatch(1.0)]),
    )
    mine, secret, port = tmp_path / "model_repository", tmp_path / "secret", free_ports().http
    secret.write_text("a-secret")
    publish(mine, builds["inside"][0])
    changes = {2: "raise RuntimeError('no memory')", 3: "__import__('time').sleep(2)", 4: "pass"}
    for number, does in changes.items():
        copy_version(mine, "inside", number)
        file = mine / "inside" / str(number) / "model.py"
        text = file.read_text()
        file.unlink()
        begins = '        """Raise nothing once a request is queued, or it would be answered twice."""\n'
        assert begins in text
        file.write_text(text.replace(begins, f"{begins}        {does}\n"))
    with (
        running(mine) as server,
        gateway(server.url, "127.0.0.1", port, "--admin-key", str(secret)),
        Asking(f"http://127.0.0.1:{port}/v1/tasks/text-classification") as asking,
        Control(server.url, mine) as control,
    ):
        where = ["--url", server.url, "--repository", str(mine), "--gateway", f"http://127.0.0.1:{port}"]
        how = ["--canary", "50%", "--admin-key", str(secret)]
        says = {2: "of its", 3: "times as long until the first answer", 4: "version 4 of inside answers"}
        answers = SimpleNamespace(monotonic=lambda: asking.answers, sleep=time.sleep)
        monkeypatch.setattr(canary, "time", answers)
        for number, expected in says.items():
            limits = ["--watch", "60", "--slower", "1000"] if number == 4 else ["--watch", "6000", "--slower", "1.2"]
            assert main(["promote", "inside", str(number), *where, *how, *limits]) == (number != 4)
            assert expected in capsys.readouterr().err
            answering = {4 if number == 4 else 1}
            assert control.versions("inside", ("READY",)) == answering
            assert versions.loaded_numbers(mine / "inside") == sorted(answering)
        assert [path.name for path in mine.iterdir()] == ["inside"]
    assert asking.failures == []
    assert asking.answers > 3 * canary.MIN_REQUESTS


PAUSE_S = 0.01  # between requests of a client, so that Triton gets a core


class Asking(AbstractContextManager["Asking"]):
    """Four clients of a gateway, which send one request after the other."""

    def __init__(self, url: str) -> None:
        self.url, self.stopping = url, threading.Event()
        self.answers, self.failures = 0, list[str]()
        self.threads = [threading.Thread(target=self._ask) for _ in range(4)]

    def __enter__(self) -> Asking:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def _ask(self) -> None:
        body = json.dumps({"model": "inside", "inputs": "The soup needs salt."}).encode()
        while not self.stopping.is_set():
            request = urllib.request.Request(self.url, body, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=120) as response:
                    response.read()
                self.answers += 1
            except OSError as error:
                self.failures.append(repr(error))
            time.sleep(PAUSE_S)


@pytest.mark.slow
def test_promote_replaces_a_version_only_by_an_equally_good_one(
    builds: Mapping[str, Pair],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both versions of an engine are loaded while the new front is tried."""
    monkeypatch.setattr(versions, "OVERLAP_S", 0)
    mine = tmp_path / "model_repository"
    good, bad = builds["beside"]
    publish(mine, good)
    with running(mine) as server, Control(server.url, mine) as control, Client(server.url, "beside") as client:
        where = ["--url", server.url, "--repository", str(mine)]
        before = client.ask({"text_input": "The soup needs salt."})
        publish(mine, good)
        assert main(["promote", "beside", *where, "--slower", "1000"]) == 0
        assert "version 2 of beside answers" in capsys.readouterr().err
        for version, refusal in (([], "is what answers"), (["7"], "no version 7 of beside")):
            assert main(["promote", "beside", *version, *where]) == 1
            assert refusal in capsys.readouterr().err
        assert control.versions("beside") == control.versions("beside_model") == {2}

        publish(mine, bad, keep=3)
        assert main(["promote", "beside", *where, "--slower", "1000"]) == 1
        assert "its answers agree by" in capsys.readouterr().err
        assert control.versions("beside") == control.versions("beside_model") == {2}
        assert control.versions("beside-candidate") == set()
        loaded = [versions.loaded_numbers(mine / name) for name in ("beside", "beside_model")]
        assert loaded == [[2], [2]], "after a restart too"
        assert sorted(path.name for path in mine.iterdir()) == ["beside", "beside_model"]
        assert client.ask({"text_input": "The soup needs salt."}) == before

        assert main(["rollback", "beside", "1", *where]) == 0
        assert control.versions("beside") == control.versions("beside_model") == {1}

        assert main(["remove", "beside", *where]) == 0
        assert control.versions("beside") == control.versions("beside_model") == set()
        assert list(mine.iterdir()) == []


@pytest.mark.parametrize(("one", "other", "alike"), [("writes", "writes_bls", True), ("writes", "writes_one", False)])
def test_compare_agrees_on_text_only_for_the_same_checkpoint(
    one: str, other: str, alike: bool, server: TritonServer
) -> None:
    """Compare through the server; one of the models samples by default."""
    trial = compare(server.url, (one, other), (1, 2), lambda client: samples_for(client, None)[:4], same_tokens)
    assert not trial.running.errors
    assert not trial.candidate.errors
    assert (trial.agreement == 1.0) is alike
    assert bool(trial.refusals(PromotionLimits(0.95, 0.5, 1e9))) is not alike


def test_compare_runs_a_search_model_without_beams(server: TritonServer) -> None:
    done: list[tuple[float, float]] = []
    trial = compare(
        server.url,
        ("sums", "sums"),
        (1, 2),
        lambda client: samples_for(client, None)[:2],
        same_tokens,
        lambda *progress: done.append(progress),
    )
    assert (trial.agreement, trial.candidate.errors) == (1.0, [])
    assert done == [(turn, 2 * ROUNDS) for turn in range(2 * ROUNDS)]
    assert min(match.parts for match in trial.agreements) >= 1


def test_compare_fits_samples_to_a_short_context(server: TritonServer) -> None:
    """Regression: long prompts with 32 new tokens did not fit, both versions failed, and the candidate was rejected."""
    trial = compare(
        server.url, ("writes", "writes_bls"), (1, 2), lambda client: samples_for(client, None)[-4:], same_tokens
    )
    assert (trial.running.errors, trial.candidate.errors, trial.shared) == ([], [], [])
    assert len(trial.agreements) == 4 * ROUNDS


def test_compare_ignores_errors_that_both_versions_share(server: TritonServer) -> None:
    """Regression: the candidate was rejected for an error that the running version returns too."""
    good, bad = {"text_input": "The museum", "max_tokens": 4}, {"text_input": "The museum", "max_tokens": 10_000}
    limits = PromotionLimits(0.95, 0.5, 1e9)
    trial = compare(server.url, ("writes", "writes_bls"), (1, 2), lambda client: [good, bad], same_tokens)
    assert (len(trial.shared), trial.refusals(limits)) == (ROUNDS, [])
    trial = compare(server.url, ("writes", "writes_bls"), (1, 2), lambda client: [bad], same_tokens)
    (refusal,) = trial.refusals(limits)
    assert "nothing was compared" in refusal
    assert "max_tokens is 10000" in refusal


def test_compare_covers_the_scores_of_all_labels(server: TritonServer) -> None:
    task = find_task("text-classification")
    assert isinstance(task, EncoderTask)

    def match(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> OutputMatch:
        return OutputMatch(1.0, numbers=task.numbers(expected, actual))

    trial = compare(server.url, ("topics", "topics"), (1, 2), lambda client: samples_for(client, None), match)
    assert set(trial.agreements[0].numbers) == {f"the score of {label}" for label in ("sport", "food", "travel")}
    assert trial.apart is not None
    assert trial.apart[0] < 0.01
