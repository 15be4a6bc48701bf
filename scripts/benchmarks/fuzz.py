"""Thousands of malformed requests over HTTP and gRPC to the embedded server, to see if it answers and leaks.

Wrong dtypes, shapes, sizes, bytes and names, inputs twice or missing, JSON cut off. Afterwards every model must answer
as before, and memory and shared memory are compared. Shapes that are negative, or that have more elements than
possible, are left out: they end Triton before 25.06, whatever it serves.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.options import make_spec
from builder.serving.client.client import Client
from builder.serving.server.triton import TritonServer, last_error, running
from scripts.benchmarks.circumstances import report_figures
from scripts.benchmarks.held import held
from tests.decoders import make_decoder_checkpoint
from tests.tiny_encoders import make_checkpoint

TYPES = ("BYTES", "BOOL", "INT32", "INT64", "FP32", "FP16", "UINT8", "", "NONSENSE")
WORDS = ("", " ", "a", "\x00", "é" * 50, "\ud83d", "word " * 3000, "x" * 2_000_000, "[MASK]", "{}", "[" * 5000)
NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, -(2**63), 2**63 - 1, 1e38, float("nan"), float("inf"), 0.5)
SAMPLES: dict[str, dict[str, Any]] = {
    "encoder": {"text_input": "The museum is closed."},
    "decoder": {"text_input": "The museum", "max_tokens": 8, "ignore_eos": True},
}


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench fuzz")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = make_models(Path(folder))
        with running(repository) as server:
            report = _fuzz(server, options.requests, random.Random(options.seed))
    report_figures(options.output, report)
    assert report["answers_after"] == "as before", report


def make_models(scratch: Path) -> Path:
    """Build a repository with a classifier and a decoder, both tiny."""
    folder = scratch / "repository"
    encoder = make_checkpoint(scratch / "encoder", "bert", "text-classification", {0: "sport", 1: "food"})
    build(make_spec(model=str(encoder), name="encoder", output=folder))
    decoder = make_decoder_checkpoint(scratch / "decoder", "llama", chat=True)
    build(make_spec(model=str(decoder), name="decoder", output=folder, slots=4, max_length=128))
    return folder


def _fuzz(server: TritonServer, requests: int, chance: random.Random) -> dict[str, Any]:
    names = {name: _names(server, name) for name in SAMPLES}
    before = _answers(server)
    first, started = held(server), time.monotonic()
    outcomes: Counter[str] = Counter()
    with grpc.insecure_channel(server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for number in range(requests):
            model = chance.choice(list(SAMPLES))
            kind = chance.choice((_http, _generate, _cut_off, _grpc))
            outcomes[f"{kind.__name__.strip('_')} {kind(server, stub, model, names[model], chance)}"] += 1
            if server.process.poll() is not None:
                where = f"{kind.__name__.strip('_')} to {model}"
                raise SystemExit(f"request {number}, {where}, ended the server: {last_error(server.log)}")
    seconds = time.monotonic() - started
    time.sleep(3)
    after = held(server)
    return {
        "requests": requests,
        "seconds": round(seconds),
        "outcomes": dict(sorted(outcomes.items())),
        "answers_after": "as before" if _answers(server) == before else "changed",
        "megabytes": [round(now.resident) for now in (first, after)],
        "shared_megabytes": [round(now.shared) for now in (first, after)],
    }


def _names(server: TritonServer, model: str) -> list[str]:
    with Client(server.url, model) as client:
        return [*(field.name for field in client.signature.inputs), "nobody", ""]


def _answers(server: TritonServer) -> dict[str, Any]:
    answers = {}
    for model, sample in SAMPLES.items():
        with Client(server.url, model) as client:
            answers[model] = client.ask(sample)
    return answers


def _shape(chance: random.Random) -> list[int]:
    """Return a shape of any rank, with no more elements than Triton 24.10 survives."""
    shape = [chance.choice((0, 1, 1, 1, 2, 3, 64, 65, 1000)) for _ in range(chance.choice((0, 1, 1, 2, 3)))]
    return [*shape, *[1] * chance.choice((0, 0, 0, 7))]


def _tensor(names: list[str], chance: random.Random) -> dict[str, Any]:
    values: list[Any] = [
        chance.choice((*WORDS, *NUMBERS, True, None, [], {})) for _ in range(chance.choice((0, 1, 1, 2, 70)))
    ]
    shape = chance.choice(([1, 1], [1], _shape(chance)))
    return {"name": chance.choice(names), "datatype": chance.choice(TYPES), "shape": shape, "data": values}


def _body(names: list[str], chance: random.Random) -> bytes:
    inputs = [_tensor(names, chance) for _ in range(chance.choice((0, 1, 1, 2, 5)))]
    if chance.random() < 0.5:  # most of a right request, so that something gets further
        inputs.append({"name": "text_input", "datatype": "BYTES", "shape": chance.choice(([1], [1, 1])), "data": ["a"]})
    return json.dumps({"inputs": inputs}).encode()


def _http(server: TritonServer, stub: Any, model: str, names: list[str], chance: random.Random) -> str:
    return _post(server, f"{model}/infer", _body(names, chance))


def _generate(server: TritonServer, stub: Any, model: str, names: list[str], chance: random.Random) -> str:
    body = {chance.choice(names): chance.choice((*WORDS, *NUMBERS, [1, 2], None)) for _ in range(3)}
    return _post(server, f"{model}/generate", json.dumps({"text_input": "a", "max_tokens": 2, **body}).encode())


def _post(server: TritonServer, path: str, body: bytes) -> str:
    request = urllib.request.Request(f"http://{server.host}:{server.ports.http}/v2/models/{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.status)
    except urllib.error.HTTPError as error:
        error.read()
        return str(error.code)
    except OSError as error:
        return type(error).__name__


def _cut_off(server: TritonServer, stub: Any, model: str, names: list[str], chance: random.Random) -> str:
    """Send a request whose client disconnects in the middle of it."""
    body = _body(names, chance)
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    whole = head + body
    with socket.create_connection((server.host, server.ports.http), timeout=10) as connection:
        connection.sendall(whole[: chance.randrange(len(whole))])
    return "left"


def _grpc(server: TritonServer, stub: Any, model: str, names: list[str], chance: random.Random) -> str:
    request = service_pb2.ModelInferRequest(model_name=model)
    for _ in range(chance.choice((0, 1, 2, 3))):
        tensor = _tensor(names, chance)
        request.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        text = chance.choice(WORDS).encode("utf-8", "surrogatepass")
        lengths = (len(text), 0, 2**31, 2**32 - 1, 3)
        request.raw_input_contents.append(struct.pack("<I", chance.choice(lengths)) + text[: chance.randrange(200)])
    if chance.random() < 0.2:
        request.raw_input_contents.append(b"\xff" * chance.randrange(64))
    try:
        stub.ModelInfer(request, timeout=60)
    except grpc.RpcError as error:
        return str(error.code().name)  # type: ignore[attr-defined]  # a call that failed has a code
    return "OK"


if __name__ == "__main__":
    main()
