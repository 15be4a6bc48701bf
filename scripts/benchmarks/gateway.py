"""Cost and limits of the gateway: `scripts/bench gateway`.

1. Tokens a second of 1, 8 and 32 streams: gRPC directly, and through the gateway, by turns in one run.
2. One client: the time to the first token, and of an embedding, asked directly and through the gateway by turns.
3. 1,000 idle connections and 200 streams at once: memory of the gateway, and answers that were lost or cut.

GPT-2 124M shape with random weights, int8, 32 slots; all-MiniLM-L6-v2. Clients are asyncio, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.building.pipeline import build
from builder.common.machine import available_cores, cpu
from builder.options import make_spec
from builder.runtime.fields import Field
from builder.serving.gateway.server import allow_connections
from builder.serving.gateway.tensors import add_tensor
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import TritonServer, free_ports, running
from scripts.benchmarks.circumstances import replace_figures
from scripts.benchmarks.generators import make_checkpoint
from tests.models import minilm

STREAMS = (1, 8, 32)
TOKENS = 64
TEXT = "How do I renew my passport when I have moved to another country?"
PROMPT = "The museum in Oslo opens late on Fridays"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench gateway")
    parser.add_argument("--repository", type=Path, help="keep the models here; built there where they are not")
    parser.add_argument("--seconds", type=float, default=5, help="of each side and number of streams (default 5)")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    console = Console(width=110)
    allow_connections()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.repository or Path(scratch) / "repository"
        make_models(folder)
        port = free_ports().http
        with running(folder) as server, gateway(server.url, "127.0.0.1", port) as process:
            figures = asyncio.run(measure(server, port, process.pid, options))
    figures |= {"cores": available_cores(), "cpu": cpu()["model"]}
    show(console, figures)
    replace_figures(options.output, figures)


def make_models(folder: Path) -> None:
    make_writer(folder)
    if not (folder / "minilm").exists():
        build(make_spec(model=str(minilm()), name="minilm", output=folder, precision="int8"))


def make_writer(folder: Path, **options: Any) -> None:
    if not (folder / "writes").exists():
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint = make_checkpoint("gpt2", Path(scratch) / "gpt2")
            limits: dict[str, Any] = {"quality": 0.0, "perplexity": 1e9}  # random weights have none to lose
            shape: dict[str, Any] = {"precision": "int8", "max_length": 256, "slots": 32}
            build(make_spec(model=str(checkpoint), name="writes", output=folder, **shape, **limits, **options))


async def measure(server: TritonServer, port: int, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    direct, through = Direct(server.url), Through(port)
    await direct.generate(8)
    await through.generate(8)
    figures["throughput"] = [await throughput(direct, through, streams, options.seconds) for streams in STREAMS]
    figures["first_token_ms"] = await by_turns(direct.first_token, through.first_token, 60)
    figures["embedding_ms"] = await by_turns(direct.embed, through.embed, 300)
    figures["crowd"] = await crowd(through, pid)
    await direct.close()
    return figures


class Direct:
    """Client of Triton's gRPC, as the gateway itself speaks it."""

    def __init__(self, url: str) -> None:
        self.channel = grpc.aio.insecure_channel(url)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()

    async def generate(self, tokens: int, started: Callable[[], None] = lambda: None) -> int:
        """Stream an answer; return its number of tokens."""
        request = service_pb2.ModelInferRequest(model_name="writes")
        for name, kind, value in (
            ("text_input", "TYPE_STRING", PROMPT),
            ("max_tokens", "TYPE_INT32", tokens),
            ("ignore_eos", "TYPE_BOOL", True),
            ("stream", "TYPE_BOOL", True),
        ):
            add_tensor(request, Field(name, kind), [value], (1,))
        call = self.stub.ModelStreamInfer()
        await call.write(request)
        await call.done_writing()
        count = 0
        while (message := await call.read()) is not grpc.aio.EOF:
            started()
            for output, raw in zip(
                message.infer_response.outputs, message.infer_response.raw_output_contents, strict=True
            ):
                if output.name == "completion_tokens":
                    count = int(np.frombuffer(raw, np.int32)[0])
        return count

    async def first_token(self) -> float:
        return await _first(self.generate)

    async def embed(self) -> float:
        request = service_pb2.ModelInferRequest(model_name="minilm")
        add_tensor(request, Field("text_input", "TYPE_STRING"), [TEXT], (1, 1))
        start = time.perf_counter()
        answer = await self.stub.ModelInfer(request)
        np.frombuffer(answer.raw_output_contents[0], np.float32)
        return (time.perf_counter() - start) * 1000


class Through:
    """Client of the gateway over keep-alive connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def close(self) -> None:
        for _, writer in self.idle:
            writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)

    async def post(self, path: str, body: bytes, started: Callable[[], None] = lambda: None) -> tuple[int, bytes]:
        """Return the status and the body of an answer, chunked or not."""
        reader, writer = connection = await self.connect()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in headers:
            parts = []
            while size := int(await reader.readline(), 16):
                started()
                parts.append((await reader.readexactly(size + 2))[:-2])
            await reader.readline()
            content = b"".join(parts)
        else:
            content = await reader.readexactly(int(headers.split(b"content-length: ")[1].split(b"\r")[0]))
        self.idle.append(connection)
        return int(headers[9:12]), content

    async def generate(self, tokens: int, started: Callable[[], None] = lambda: None) -> int:
        """Stream an answer; return its number of tokens."""
        usage = {"include_usage": True}
        body = {"model": "writes", "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        status, content = await self.post(
            "/v1/completions", json.dumps({**body, "stream_options": usage}).encode(), started
        )
        *_, last, done, _ = content.split(b"\n\n")
        assert (status, done) == (200, b"data: [DONE]"), content[-300:]
        return int(json.loads(last[6:])["usage"]["completion_tokens"])

    async def first_token(self) -> float:
        return await _first(self.generate)

    async def embed(self) -> float:
        body = json.dumps({"model": "minilm", "input": TEXT, "encoding_format": "base64"}).encode()
        start = time.perf_counter()
        status, content = await self.post("/v1/embeddings", body)
        json.loads(content)
        assert status == 200
        return (time.perf_counter() - start) * 1000


async def _first(generate: Callable[[int, Callable[[], None]], Awaitable[int]]) -> float:
    """Return the milliseconds to the first token of a short answer."""
    times: list[float] = []
    start = time.perf_counter()
    await generate(2, lambda: times.append(time.perf_counter()))
    return (times[0] - start) * 1000


async def throughput(direct: Direct, through: Through, streams: int, seconds: float) -> dict[str, Any]:
    """Return the tokens a second of both, by turns, twice each."""
    rates: dict[str, list[float]] = {"direct": [], "gateway": []}
    for _ in range(2):
        for name, side in (("direct", direct), ("gateway", through)):
            rates[name].append(await rate(side, streams, seconds))
    best = {name: float(np.mean(values)) for name, values in rates.items()}
    return {"streams": streams, **best, "rounds": rates, "share": best["gateway"] / best["direct"]}


async def rate(side: Direct | Through, streams: int, seconds: float) -> float:
    """Return the tokens a second of so many clients, each of which asks one request after the other."""
    start = time.perf_counter()

    async def client() -> int:
        count = 0
        while time.perf_counter() - start < seconds:
            count += await side.generate(TOKENS)
        return count

    counts = await asyncio.gather(*(client() for _ in range(streams)))
    return sum(counts) / (time.perf_counter() - start)


async def by_turns(
    direct: Callable[[], Awaitable[float]], through: Callable[[], Awaitable[float]], count: int
) -> dict[str, float]:
    """Return the medians of both, and of the extra time of the second."""
    for side in (direct, through):
        for _ in range(5):
            await side()
    pairs = np.array([(await direct(), await through()) for _ in range(count)])
    medians = np.median(pairs, axis=0)
    return {"direct": float(medians[0]), "gateway": float(medians[1]), "added": float(medians[1] - medians[0])}


async def crowd(through: Through, pid: int) -> dict[str, Any]:
    """Open 1,000 idle connections and 200 streams."""
    before = _memory_mb(pid)
    idle = [await asyncio.open_connection("127.0.0.1", through.port) for _ in range(1000)]
    connected = _memory_mb(pid)
    counts = await asyncio.gather(*(through.generate(16) for _ in range(200)))
    after = _memory_mb(pid)
    for _, writer in idle:
        writer.close()
    whole = sum(count == 16 for count in counts)
    return {"before_mb": before, "idle_mb": connected, "after_mb": after, "streams": 200, "whole_answers": whole}


def _memory_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def show(console: Console, figures: dict[str, Any]) -> None:
    table = Table(title="tokens a second", title_justify="left")
    for column in ("streams", "gRPC", "gateway", "share"):
        table.add_column(column, justify="right")
    for row in figures["throughput"]:
        table.add_row(str(row["streams"]), f"{row['direct']:.0f}", f"{row['gateway']:.0f}", f"{row['share']:.0%}")
    console.print(table)
    for name in ("first_token_ms", "embedding_ms", "crowd"):
        console.print(name, figures[name])


if __name__ == "__main__":
    main()
