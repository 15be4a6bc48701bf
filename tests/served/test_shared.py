"""A shared front on a real Triton: its answers are bit-identical to those of each model's own front."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builder.cli import main
from builder.common.errors import RepositoryError, ServeError
from builder.common.samples import TEXTS
from builder.repository.lint import lint
from builder.repository.lint.findings import Finding, Severity
from builder.repository.publish import publish
from builder.repository.sharing.hosting import hosted_model, read_hosted
from builder.repository.sharing.share import share, unshare
from builder.repository.signatures import sign, unsigned
from builder.repository.signing_keys import Signer
from builder.repository.verdict import Verified
from builder.repository.versions import remove, rollback, served_number
from builder.runtime.contract import FILE
from builder.runtime.hosted import HOSTED, dump_hosted
from builder.serving.client.client import Client
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import TritonServer, free_ports, running
from scripts.benchmarks.publish import LABELS, one_build
from tests.served.adapters import held_files
from tests.served.guests import guest
from tests.served.patience import comes_about
from tests.served.statistics import TRIES, counted, settled
from tests.signing import write_keys

NAMES = ("one", "two")
FLOOD = 600
TOGETHER_US = 150_000  # queue delay of the dynamic batcher, so that requests sent at once form one batch
Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Shared:
    """Server of the shared front `encoders`.

    `own`: answers to each of TEXTS by each model's own front; `both`: its answers to two texts at once.
    """

    server: TritonServer
    models: Path
    own: Mapping[str, Sequence[Tensors]]
    both: Mapping[str, Tensors]
    newer: Verified

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture(scope="module")
def hosting(module_folder: Callable[[str], Path]) -> Iterator[Shared]:
    folder = module_folder("shared")
    repository = folder / "repository"
    for turn, name in enumerate(NAMES):
        publish(repository, one_build(name, folder, {}, turn))
    newer = one_build("one", folder, {}, 1)
    with running(repository) as server:
        own = {name: [_asked(server.url, name, [text]) for text in TEXTS[:6]] for name in NAMES}
        both = {name: _asked(server.url, name, TEXTS[:2]) for name in NAMES}
    shutil.copytree(repository, folder / "untouched")
    assert main(["share", *NAMES, "--name", "encoders", "--memory-mb", "700", "--repository", str(repository)]) == 0
    assert [path.name for path in repository.iterdir()] == ["encoders"]
    assert [finding for finding in lint(repository) if finding.severity is Severity.ERROR] == []
    _set_queue_delay(repository / "encoders")
    models = repository / "encoders" / "models"
    _add_damaged(models)
    with running(repository) as server:
        yield Shared(server, models, own, both, newer)


def _set_queue_delay(front: Path) -> None:
    config = front / "config.pbtxt"
    delay = "max_queue_delay_microseconds: "
    config.write_text(config.read_text().replace(f"{delay}0", f"{delay}{TOGETHER_US}"))


def _add_damaged(models: Path) -> None:
    """Add a model without its graph, which no build publishes."""
    shutil.copytree(models / "two", models / "damaged")
    (models / "damaged" / "1" / "model.onnx").unlink()
    entries = read_hosted(models).entries
    (models / HOSTED).write_text(dump_hosted({**entries, "damaged": {**entries["two"], "max_batch_size": 1}}))


def _inputs(texts: Sequence[str], model: str | None) -> list[Any]:
    tensors = {
        "text_input": np.array([[text.encode()] for text in texts], np.object_),
        "top_k": np.full((len(texts), 1), 3, np.int32),
    }
    if model is not None:
        tensors["model"] = np.array([[model.encode()]] * len(texts), np.object_)
    kinds = {"top_k": "INT32"}
    return [
        grpc.InferInput(name, array.shape, kinds.get(name, "BYTES")).set_data_from_numpy(array)
        for name, array in tensors.items()
    ]


def _asked(url: str, name: str, texts: Sequence[str], model: str | None = None) -> Tensors:
    with grpc.InferenceServerClient(url) as client:
        result = client.infer(name, _inputs(texts, model))
        return {output: result.as_numpy(output) for output in ("label", "score", "truncated", "prompt_tokens")}


def _at_once(url: str, requests: Sequence[tuple[str, Sequence[str]]]) -> list[Any]:
    """Return the answers to requests of (model, texts) that are sent together, or their errors."""
    came: queue.SimpleQueue[tuple[int, Any, Any]] = queue.SimpleQueue()
    with grpc.InferenceServerClient(url) as client:
        for number, (model, texts) in enumerate(requests):
            client.async_infer(
                "encoders",
                _inputs(texts, model),
                lambda result, error, number=number: came.put((number, result, error)),
            )
        answers = sorted((came.get(timeout=300) for _ in requests), key=lambda answer: answer[0])
    return [str(error) if error is not None else result for _, result, error in answers]


def _assert_same(actual: Any, expected: Tensors) -> None:
    for name, array in expected.items():
        got = actual[name] if isinstance(actual, dict) else actual.as_numpy(name)
        np.testing.assert_array_equal(got, array, strict=True)


def test_shared_front_answers_equal_those_of_own_fronts(hosting: Shared) -> None:
    for name in NAMES:
        _assert_same(_asked(hosting.url, "encoders", TEXTS[:2], name), hosting.both[name])
    for number in range(6):
        answers = _batch(hosting.url, [(name, TEXTS[number : number + 1]) for name in NAMES])
        for name, answer in zip(NAMES, answers, strict=True):
            _assert_same(answer, hosting.own[name][number])
    answers = _batch(hosting.url, [(name, [text]) for name in NAMES for text in TEXTS[:2]])
    for index, name in enumerate(NAMES):  # two requests of a model in a batch are one call, as in its own front
        rows = [answers[2 * index + row].as_numpy("score") for row in range(2)]
        np.testing.assert_array_equal(np.concatenate(rows), hosting.both[name]["score"])


def _batch(url: str, requests: Sequence[tuple[str, Sequence[str]]]) -> list[Any]:
    """Return the answers to requests that came together and formed one batch."""
    with Client(url, "encoders") as client:
        before = counted(settled(client))
        for _ in range(TRIES):
            answers = _at_once(url, requests)
            after = counted(settled(client, before[0] + len(requests)))
            if (after[0] - before[0], after[1] - before[1]) == (len(requests), 1):
                return answers
            before = after
    pytest.fail(f"{len(requests)} requests were never one batch")


def test_requests_in_a_shared_batch_get_their_own_errors(hosting: Shared) -> None:
    answers = _at_once(
        hosting.url,
        [
            ("one", TEXTS[:1]),
            ("three", TEXTS[:1]),
            ("one", [" "]),
            ("damaged", TEXTS[:1]),
            ("two", ["word " * 600]),
            ("two", TEXTS[:1]),
        ],
    )
    _assert_same(answers[0], hosting.own["one"][0])
    _assert_same(answers[5], hosting.own["two"][0])
    for answer, words in zip(
        answers[1:5],
        (
            "no model 'three' is hosted here; there are: damaged, one, two",
            "text_input, row 0, is empty",
            "the model damaged is not ready, it cannot be loaded",
            "the limit of this model is 512",
        ),
        strict=True,
    ):
        assert words in answer
    again = _at_once(hosting.url, [("damaged", TEXTS[:1])])
    assert "model damaged is not ready" in again[0]
    assert "it is tried again after 10 s" in again[0]


def test_shared_front_refuses_inputs_that_triton_would_refuse(hosting: Shared) -> None:
    with Client(hosting.url, "encoders") as client:
        with pytest.raises(ServeError, match="text_input is missing; one does not answer without it"):
            client.ask({"model": "one"})
        mixed = {"text_input": np.array([[b"a"], [b"b"]], object), "model": np.array([[b"one"], [b"two"]], object)}
        with pytest.raises(ServeError, match="model differs between the rows"):
            client.ask_tensors(mixed)
    with pytest.raises(InferenceServerException, match="model is missing: say whose request it is"):
        _asked(hosting.url, "encoders", TEXTS[:1])
    (refused,) = _at_once(hosting.url, [("damaged", TEXTS[:2])])
    assert "the request has 2 rows; damaged takes at most 1 at once" in refused


def test_shared_front_serves_new_versions_without_a_restart(hosting: Shared) -> None:
    assert _labels(hosting, "one") == set(LABELS[0].values())
    publish(hosting.models, hosting.newer)
    assert _labels(hosting, "one") == set(LABELS[1].values()), "what is asked after it is published"
    assert sorted(read_hosted(hosting.models)) == ["damaged", "one", "two"]
    for number in (1, 2, 1):
        assert main(["rollback", "one", str(number), "--repository", str(hosting.models)]) == 0
        assert _labels(hosting, "one") == set(LABELS[number - 1].values())
    _assert_same(_asked(hosting.url, "encoders", TEXTS[:1], "one"), hosting.own["one"][0])


def test_shared_front_keeps_a_version_if_the_next_fails_to_load(hosting: Shared) -> None:
    _asked(hosting.url, "encoders", TEXTS[:1], "two")
    entries = read_hosted(hosting.models).entries
    shutil.copytree(hosting.models / "damaged" / "1", hosting.models / "two" / "7")
    broken = {**entries, "two": {**entries["two"], "version": 7, "build": "broken"}}
    (hosting.models / HOSTED).write_text(dump_hosted(broken))
    for _ in range(2):
        _assert_same(_asked(hosting.url, "encoders", TEXTS[:1], "two"), hosting.own["two"][0])
    (hosting.models / HOSTED).write_text(dump_hosted(dict(entries)))
    shutil.rmtree(hosting.models / "two" / "7")


def _labels(hosting: Shared, name: str) -> set[str]:
    """Return the current labels of a model."""
    return {label.decode() for label in _asked(hosting.url, "encoders", TEXTS[:1], name)["label"][0]}


def test_busy_model_of_a_shared_front_does_not_delay_others(hosting: Shared, tmp_path: Path) -> None:
    """Flood the model `one`, then send a request to `two`, which is last in Triton's queue."""
    front = hosting.models.parent
    files, parameters = held_files(front / "1", "shared"), {"place": str(tmp_path)}
    calls, closed = tmp_path / "calls", tmp_path / "closed"
    with guest(hosting.server, front, "held", files, parameters, queue=20, repository=str(hosting.models)):
        for name in NAMES:
            _assert_same(_asked(hosting.url, "held", TEXTS[:1], name), hosting.own[name][0])
        calls.unlink()
        closed.touch()
        try:
            answers = _after_a_flood(hosting.url, comes_first=calls.exists, open_gate=closed.unlink)
        finally:
            closed.unlink(missing_ok=True)
    for model, result, error in answers:
        if error is None:
            np.testing.assert_allclose(result.as_numpy("score"), hosting.own[model][0]["score"], atol=1e-5)
        else:
            assert (model, "20 requests wait already for one and the limit is 20" in str(error)) == ("one", True)
    lines = [line.split() for line in calls.read_text().splitlines()]
    before = sum(int(count) for _, count in lines[: [name for name, _ in lines].index("two")])
    assert before <= 1 + 2 * 8, "what came first, the batch that was being answered, and those of its own"
    assert sum(error is not None for *_, error in answers) >= FLOOD - 20 - 2 * 8


def _after_a_flood(
    url: str, comes_first: Callable[[], bool], open_gate: Callable[[], None]
) -> list[tuple[str, Any, Any]]:
    """Return (model, answer, error) for a first request to `one`, a flood to `one`, and a request to `two`."""
    came: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()

    def ask(client: grpc.InferenceServerClient, model: str) -> None:
        client.async_infer("held", _inputs(TEXTS[:1], model), lambda result, error: came.put((model, result, error)))

    with grpc.InferenceServerClient(url) as client:
        ask(client, "one")
        assert comes_about(comes_first)
        for model in (*["one"] * FLOOD, "two"):
            ask(client, model)
        open_gate()
        return [came.get(timeout=300) for _ in range(FLOOD + 2)]


def test_gateway_lists_each_model_of_a_shared_front(hosting: Shared) -> None:
    port = free_ports().http
    with gateway(hosting.url, "127.0.0.1", port), httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
        assert sorted(models) == ["damaged", "one", "two"]
        assert (models["two"]["labels"], models["two"]["max_model_len"]) == (["red", "green", "blue"], 512)
        assert "model" not in [field["name"] for field in models["two"]["inputs"]]

        def ask(name: str, text: str) -> Any:
            body = {"model": name, "inputs": text, "parameters": {"top_k": 3}}
            return http.post("/v1/tasks/text-classification", json=body).json()

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda name: ask(name, TEXTS[0]), NAMES * 2))
        for name, answer in zip(NAMES * 2, answers, strict=True):
            expected = hosting.own[name][0]
            (scored,) = answer
            assert [one["label"] for one in scored] == [label.decode() for label in expected["label"][0]]
            np.testing.assert_allclose([one["score"] for one in scored], expected["score"][0], rtol=1e-5)
        refused = http.post("/v1/tasks/text-classification", json={"model": "damaged", "inputs": "a"})
        assert (refused.status_code, "damaged is not ready" in refused.text) == (503, True)
        missing = http.post("/v1/tasks/text-classification", json={"model": "encoders", "inputs": "a"})
        assert missing.status_code == 404, "the shared front is no model of its own"


@pytest.fixture
def own_fronts(hosting: Shared, tmp_path: Path) -> Path:
    """Copy the two models with their own fronts."""
    return Path(shutil.copytree(hosting.models.parents[2] / "untouched", tmp_path / "repository"))


def test_share_refuses_unsuitable_models_without_changes(own_fronts: Path) -> None:
    config = own_fronts / "two" / "1" / "config.pbtxt"
    before = config.read_text()
    serving = own_fronts / "two" / "1" / FILE
    document = serving.read_text()
    for text, wrong, message in (
        (
            config,
            before.replace("text-classification", "text-ranking"),
            "two is for text-ranking, and the shared .* another --name",
        ),
        (
            config,
            before.replace("data_type: TYPE_FP32", "data_type: TYPE_FP64"),
            r"two has the output score FP64\[-1\]",
        ),
        (
            config,
            before.replace('name: "score"', 'name: "scores"'),
            "two has the output scores .* has none of that name",
        ),
        (serving, document.replace('"executor": "onnxruntime"', '"executor": "bls"'), "--executor in-process"),
    ):
        original = text.read_text()
        text.write_text(wrong)
        with pytest.raises(RepositoryError, match=message):
            share(own_fronts, "encoders", NAMES)
        text.write_text(original)
        assert sorted(path.name for path in own_fronts.iterdir()) == ["one", "two"]
    (own_fronts / "two" / "1" / "encoder" / "front.py").unlink()
    with pytest.raises(RepositoryError, match=r"of an earlier build-repo.*: build it again"):
        hosted_model(own_fronts / "two", 1)
    for name, message in (("gone", "has no model gone"), ("one", "one is not a shared front")):
        with pytest.raises(RepositoryError, match=message):
            share(own_fronts, "one", [name])


def test_share_adds_and_removes_models_and_keeps_the_memory(own_fronts: Path) -> None:
    assert share(own_fronts, "encoders", ["one"], memory_mb=300) == ["one"]
    assert share(own_fronts, "encoders", ["two"]) == ["one", "two"], "no new version of the front"
    front = own_fronts / "encoders"
    assert sorted(path.name for path in front.iterdir()) == ["1", "config.pbtxt", "models"]
    assert '"memory_mb": 300' in (front / "1" / FILE).read_text()
    share(own_fronts, "encoders", [], memory_mb=400)
    assert '"memory_mb": 400' in (front / "2" / FILE).read_text()
    assert "versions: [ 2 ]" in (front / "config.pbtxt").read_text()
    remove(front / "models", "one")
    assert list(read_hosted(front / "models")) == ["two"]
    shutil.copytree(front / "models" / "two", own_fronts / "two")
    with pytest.raises(RepositoryError, match="encoders hosts two already; build its next version there"):
        share(own_fronts, "encoders", ["two"])


@pytest.mark.parametrize(
    ("name", "memory_mb", "message"),
    [
        ("../elsewhere", None, r"'\.\./elsewhere' is not a model name: use letters, digits"),
        (".hidden", None, "'.hidden' is not a model name"),
        ("encoders", 0, "0 MB is not memory for a process: give at least 1"),
        ("encoders", -4, "-4 MB is not memory for a process"),
    ],
)
def test_share_refuses_an_invalid_name_or_memory(
    own_fronts: Path, name: str, memory_mb: int | None, message: str
) -> None:
    with pytest.raises(RepositoryError, match=message):
        share(own_fronts, name, NAMES, memory_mb)
    assert sorted(path.name for path in own_fronts.iterdir()) == ["one", "two"]


def test_unshare_restores_own_fronts(own_fronts: Path, hosting: Shared) -> None:
    before = _content(own_fronts / "one")
    share(own_fronts, "encoders", NAMES)
    with pytest.raises(RepositoryError, match=r"no model one; encoders hosts it: --repository .*/encoders/models$"):
        rollback(own_fronts, "one")
    models = own_fronts / "encoders" / "models"
    publish(models, hosting.newer)
    assert unshare(own_fronts, "encoders", ["one"]) == ["two"]
    assert list(read_hosted(models)) == ["two"]
    assert served_number(own_fronts / "one") == 2
    assert rollback(own_fronts, "one") == 1
    after = _content(own_fronts / "one")
    assert before == {path: after.get(path) for path in before}
    assert [finding for finding in lint(own_fronts) if finding.severity is Severity.ERROR] == []


def test_unshare_refuses_unknown_models_and_fronts(own_fronts: Path) -> None:
    share(own_fronts, "encoders", ["one"])
    for front, name, message in (
        ("encoders", "gone", "encoders does not host gone; it hosts one"),
        ("two", "one", "two is not a shared front"),
        ("nowhere", "one", "nowhere is not a shared front"),
    ):
        with pytest.raises(RepositoryError, match=message):
            unshare(own_fronts, front, [name])
    shutil.copytree(own_fronts / "two", own_fronts / "one")
    with pytest.raises(RepositoryError, match="has a model one already: remove or rename it first"):
        unshare(own_fronts, "encoders", ["one"])
    assert list(read_hosted(own_fronts / "encoders" / "models")) == ["one"]


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_publish_refuses_a_build_that_its_shared_front_cannot_host(own_fronts: Path, hosting: Shared) -> None:
    share(own_fronts, "encoders", ["two"])
    front = own_fronts / "encoders"
    config = (front / "config.pbtxt").read_text()
    (front / "config.pbtxt").write_text(config.replace("text-classification", "text-ranking"))
    with pytest.raises(RepositoryError, match="one is for text-classification, and the shared front encoders"):
        publish(front / "models", hosting.newer)
    assert sorted(path.name for path in (front / "models").iterdir()) == [HOSTED, "two"]
    (front / "config.pbtxt").write_text(config)
    publish(front / "models", hosting.newer)
    assert read_hosted(front / "models")["one"].version == 1
    publish(front / "models", hosting.newer)
    assert rollback(front / "models", "one") == 1
    assert read_hosted(front / "models")["one"].version == 1


def test_share_command_names_missing_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["share", "--name", "encoders", "--repository", str(tmp_path)]) == 1
    assert "encoders has no models yet: name those" in capsys.readouterr().err
    assert main(["unshare", "one", "--name", "encoders", "--repository", str(tmp_path)]) == 1
    assert "encoders is not a shared front" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["share", "one"])


def test_check_finds_errors_of_a_shared_front(own_fronts: Path) -> None:
    share(own_fronts, "encoders", NAMES)
    models = own_fronts / "encoders" / "models"
    hosted = (models / HOSTED).read_text()
    assert _errors(own_fronts) == []
    for old, instead, words in (
        ('"version": 1', '"version": 3', "hosted.json names version 3 of one, which is not there"),
        ('"max_batch_size": 8', '"max_batch_size": 9', "hosted.json says of one what its files do not"),
        ('"schema"', '"scheme"', "hosted.json has schema 1"),
        ('"version": 1', '"version": "x"', "hosted.json.one.version is 'x'"),
    ):
        (models / HOSTED).write_text(hosted.replace(old, instead, 1))
        (error,) = _errors(own_fronts)
        assert (error.code, words in error.found) == ("TR709", True), error
    (models / HOSTED).write_text(hosted)
    (models / "two" / "1" / "tokenizer.json").write_text("{}")
    (error,) = _errors(own_fronts)
    assert (error.code, error.file) == ("TR802", "encoders/models/two/1/tokenizer.json")


def _errors(repository: Path) -> list[Finding]:
    return [finding for finding in lint(repository) if finding.severity is Severity.ERROR]


def test_signatures_cover_the_models_of_a_shared_front(own_fronts: Path, tmp_path: Path) -> None:
    share(own_fronts, "encoders", NAMES)
    secret, public = write_keys(tmp_path)
    assert "encoders/models/two: version 1 is not signed" in " ".join(unsigned(own_fronts, public))
    assert sign(own_fronts, Signer(secret)) == ["encoders/1", "encoders/models/one/1", "encoders/models/two/1"]
    assert unsigned(own_fronts, public) == []
    hosted = own_fronts / "encoders" / "models" / HOSTED
    hosted.write_text(hosted.read_text().replace('"version": 1', '"version": 2'))
    assert len(unsigned(own_fronts, public)) == 2
    (own_fronts / "encoders" / "models" / "one" / "1" / "encoder" / "text.py").write_text("import os")
    assert any(
        "encoders/models/one: 1/encoder/text.py was changed" in problem for problem in unsigned(own_fronts, public)
    )
