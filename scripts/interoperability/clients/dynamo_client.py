"""NVIDIA Dynamo: its frontend and its Triton worker, each a process, with our Triton behind the worker.

The frontend (KServe's gRPC, and OpenAI's HTTP) and the worker are those of the wheels. The worker's in-process Triton,
which no package index has, is replaced by in_process/tritonserver.py, over gRPC.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from checking import WORK, check, report
from tritonclient.utils import InferenceServerException

START_S = 120
TEXT = "The museum in Oslo opens late on Fridays"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def dynamo(frontend: list[str], worker: list[str], *models: str) -> Iterator[int]:
    """Run a frontend with a worker over our Triton, which has all models or those named; yield the frontend's port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w") as log:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent / "in_process"),
            "TRITON_GRPC": WORK["grpc"],
            "TRITON_MODELS": " ".join(models),
            "DYN_FILE_KV": folder,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
        }
        commands = [
            ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *frontend],
            ["dynamo.triton", "--model-repository", folder, *worker],
        ]
        processes = [
            subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=log, stderr=log)
            for command in commands
        ]
        try:
            yield port
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
            print((Path(folder) / "log").read_text()[-8000:], file=sys.stderr)


def ready(client: triton.InferenceServerClient, *names: str) -> None:
    """Wait until the frontend has all models."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(InferenceServerException):
            if all(client.is_model_ready(name) for name in names):
                return
        time.sleep(0.5)
    raise TimeoutError(f"the frontend has no {' and '.join(names)} after {START_S} s")


def text(name: str, values: list[str], shape: list[int]) -> triton.InferInput:
    tensor = triton.InferInput(name, shape, "BYTES")
    return tensor.set_data_from_numpy(np.array([value.encode() for value in values], object).reshape(shape))


def infer(client: triton.InferenceServerClient, name: str, inputs: list[Any], outputs: Any = None) -> Any:
    return client.infer(name, inputs, outputs=outputs, client_timeout=60)


with dynamo(["--kserve-grpc-server"], []) as served:
    through, direct = (triton.InferenceServerClient(url) for url in (f"127.0.0.1:{served}", WORK["grpc"]))

    @check("KServe: ready, metadata and configuration are Triton's")
    def _() -> None:
        ready(through, WORK["embeds"], WORK["ranks"], WORK["writes"], WORK["labels"])
        for name in (WORK["embeds"], WORK["labels"]):
            ours, theirs = (side.get_model_metadata(name, as_json=True) for side in (direct, through))
            assert ours["inputs"] == theirs["inputs"], theirs
            assert ours["outputs"] == theirs["outputs"], theirs
            config = through.get_model_config(name, as_json=True)["config"]
            assert config["max_batch_size"] == direct.get_model_config(name, as_json=True)["config"]["max_batch_size"]

    @check("KServe: embeddings, as from Triton")
    def _() -> None:
        inputs = [text("text_input", [TEXT, "Two"], [2, 1])]
        ours, theirs = (infer(side, WORK["embeds"], inputs).as_numpy("embedding") for side in (direct, through))
        assert theirs.dtype == np.float32
        np.testing.assert_allclose(theirs, ours, atol=1e-5)

    @check("KServe: labels, as from Triton")
    def _() -> None:
        inputs = [text("text_input", [TEXT, "Two"], [2, 1])]
        ours, theirs = (infer(side, WORK["labels"], inputs) for side in (direct, through))
        assert ours.as_numpy("label").tolist() == theirs.as_numpy("label").tolist()
        np.testing.assert_allclose(theirs.as_numpy("score"), ours.as_numpy("score"), atol=1e-5)

    @check("KServe: an optional input, and a refusal with the model's message")
    def _() -> None:
        def scores(top: int) -> Any:
            top_k = triton.InferInput("top_k", [1, 1], "INT32").set_data_from_numpy(np.array([[top]], np.int32))
            return infer(through, WORK["labels"], [text("text_input", [TEXT], [1, 1]), top_k]).as_numpy("score")

        assert scores(2).shape == (1, 2)
        try:
            scores(-1)
        except InferenceServerException as error:
            message = str(error)
        else:
            message = "top_k -1 was answered"
        assert "top_k is -1" in message, message

    @check("KServe: classification (class_count), as from Triton")
    def _() -> None:
        inputs = [text("text_input", [TEXT], [1, 1])]
        for model, output in ((WORK["embeds"], "embedding"), (WORK["labels"], "class_scores")):
            outputs = [triton.InferRequestedOutput(output, class_count=2)]
            ours, theirs = (infer(side, model, inputs, outputs).as_numpy(output).tolist() for side in (direct, through))
            assert ours == theirs, f"{theirs}, and Triton: {ours}"
            assert [len(one.split(b":")) for one in theirs[0]] == [3 if model == WORK["labels"] else 2] * 2, theirs

    @check("KServe: generation, streamed")
    def _() -> None:
        answers: list[list[bytes]] = []
        for url in (WORK["grpc"], f"127.0.0.1:{served}"):
            arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
            with triton.InferenceServerClient(url) as client:
                client.start_stream(lambda result, error, to=arrived: to.put((result, error)))
                flags = [
                    triton.InferInput(name, [1], "BOOL").set_data_from_numpy(np.array([True]))
                    for name in ("stream", "ignore_eos")
                ]
                limit = triton.InferInput("max_tokens", [1], "INT32").set_data_from_numpy(np.array([8], np.int32))
                client.async_stream_infer(WORK["writes"], [text("text_input", [TEXT], [1]), limit, *flags])
                pieces: list[bytes] = []
                while True:
                    result, error = arrived.get(timeout=60)
                    assert error is None, error
                    pieces.append(result.as_numpy("text_output").tolist()[0])
                    if result.as_numpy("finish_reason") is not None:
                        break
            answers.append(pieces)
        assert b"".join(answers[0]) == b"".join(answers[1]), answers
        assert len(answers[1]) > 1, answers


def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


CLASSIFY = ["--task", "classify", "--classify-input-name", "text_input", "--classify-output-name", "class_scores"]
with dynamo([], CLASSIFY, WORK["labels"]) as http:

    @check("/v1/classify: the best label, and a probability of each class, in their order")
    def _() -> None:
        end, status, answer = time.monotonic() + START_S, 0, {}
        while time.monotonic() < end and status != 200:
            with contextlib.suppress(OSError):
                status, answer = post(http, "/v1/classify", {"model": WORK["labels"], "input": [TEXT, "Two"]})
            time.sleep(0.5)
        assert status == 200, f"{status} {answer}"
        top = triton.InferInput("top_k", [2, 1], "INT32").set_data_from_numpy(np.full((2, 1), 9, np.int32))
        with triton.InferenceServerClient(WORK["grpc"]) as client:
            best = infer(client, WORK["labels"], [text("text_input", [TEXT, "Two"], [2, 1]), top])
        for row, labels, scores in zip(answer["data"], best.as_numpy("label"), best.as_numpy("score"), strict=True):
            assert row["label"] == labels[0].decode(), answer["data"]
            ours = dict(zip((label.decode() for label in labels), scores, strict=True))
            np.testing.assert_allclose(row["probs"], [ours[name] for name in WORK["classes"]], atol=1e-5)


report()
