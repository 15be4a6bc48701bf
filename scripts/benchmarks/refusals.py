"""Bursts at a decoder, of which hundreds are refused, beside an encoder that is asked all the time.

More requests than the thousand that Triton keeps payloads for wait for the decoder. Before release 26.11 that can
corrupt Triton's memory, after which it answers nothing (docs/explanation/failures.md). Each round sends DECODED
requests over STREAMS gRPC streams while CLIENTS ask through the gateway, all of `build-repo serve`. glibc keeps no
freed memory back for each thread, so that a corruption shows early. Prints a line a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.checkpoints.libraries import quiet_libraries
from builder.runtime.fields import Field
from builder.serving.client.responses import LAST, SAY_LAST
from builder.serving.gateway.server import allow_connections
from builder.serving.gateway.tensors import add_tensor, read_outputs
from builder.serving.server.gateway import GATEWAY_PROGRAM
from builder.serving.server.triton import free_ports
from scripts.benchmarks.circumstances import report_figures
from scripts.benchmarks.fuzz import make_models
from scripts.benchmarks.gateway import Through

DECODED, STREAMS = 3000, 10
CLIENTS = 100  # of the encoder
PAUSE_S = 0.2  # after a refusal or a failure
PROMPTS = ("The museum", "A train to", "It rains in", "My neighbour", "They sell")
TEXTS = ("The museum is closed.", "The soup was cold.", "Our team has won again.")
MAX_TOKENS = 20
MAX_SILENCE_S = 30.0  # of silence, without an answer, a refusal or an error status; a longer one is a hang
REQUEST_TIMEOUT_S = 10.0  # of a silent stream, and of a request to the gateway
START_TIMEOUT_S = 120.0
GIVE_UP_S = 180.0  # of a server that does not answer
STOP_TIMEOUT_S = 60.0
REFUSED = ("wait already", "Exceeds maximum queue size")
REFUSED_OR_LOST = (AssertionError, OSError, ValueError, IndexError, asyncio.IncompleteReadError)


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench refusals")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--repository", type=Path, help="keep the models here; built there where they are not")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    allow_connections()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.repository or Path(scratch)) / "repository"
        if not folder.exists():
            make_models(folder.parent)
        log = Path(scratch) / "serve.log"
        with served(folder, log) as stress:
            report = asyncio.run(stress.run(options.minutes * 60))
        print(*(line for line in log.read_text().splitlines() if not line.startswith("{")), sep="\n")
    report_figures(options.output, report)
    assert not report["wrong"], report["wrong"]
    assert report["longest_silence_s"] <= MAX_SILENCE_S, f"nothing was answered for {report['longest_silence_s']} s"


@contextmanager
def served(repository: Path, log: Path) -> Iterator[Stress]:
    """Run `build-repo serve` on `repository`, with its gateway, until the end. It writes its output to `log`."""
    ports, gateway = free_ports(), free_ports().http
    options = [word for kind, port in vars(ports).items() for word in (f"--{kind}-port", str(port))]
    command = [sys.executable, "-c", GATEWAY_PROGRAM, "serve", str(repository), *options, "--openai-port", str(gateway)]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True) as process,
    ):
        try:
            yield Stress(process, f"127.0.0.1:{ports.grpc}", gateway)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                print(f"serve did not end within {STOP_TIMEOUT_S:g} s", flush=True)
                _kill(process.pid)


class Stress:
    """Clients of `process`, which is `build-repo serve`: Triton's gRPC at `url`, the gateway at `port`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, port: int) -> None:
        self.process, self.url, self.through = process, url, Through(port)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.expected: dict[str, str] = {}
        self.servers: list[int] = []  # process ids of Triton, in the order in which they were seen
        self.last, self.silence = time.monotonic(), 0.0

    async def run(self, seconds: float) -> dict[str, Any]:
        """Run rounds for `seconds`. Return the figures of each."""
        await self._wait(START_TIMEOUT_S)
        for prompt in PROMPTS:
            await self._decode([prompt], learn=True)
        for text in TEXTS:
            self.expected[text] = await self._encode(text)
        self._reset()
        rounds: list[dict[str, Any]] = []
        started = time.monotonic()
        while time.monotonic() - started < seconds and self.silence <= GIVE_UP_S:
            rounds.append(await self._round(len(rounds) + 1))
        return {
            "rounds": rounds,
            "refused": sum(each["refused"] for each in rounds),
            "failed": sum(each["failed"] for each in rounds),
            "longest_silence_s": max(each["silence_s"] for each in rounds),
            "restarts": len(self.servers) - 1,
            "wrong": self.wrong[:5],
        }

    async def _round(self, number: int) -> dict[str, Any]:
        self._reset()
        each = DECODED // STREAMS
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(each)]
        decoding = asyncio.gather(*(self._decode(prompts) for _ in range(STREAMS)))
        await asyncio.gather(*(self._encode_until(decoding, client) for client in range(CLIENTS)))
        await decoding
        await self._wait(GIVE_UP_S)
        counts = {name: self.counts[name] for name in ("sent", "answered", "refused", "failed")}
        figures = {"round": number, **counts, "silence_s": round(self.silence, 1), "restarts": len(self.servers) - 1}
        print(json.dumps(figures), flush=True)
        return figures

    def _reset(self) -> None:
        self.counts.clear()
        self.last, self.silence = time.monotonic(), 0.0

    def _heard(self) -> None:
        """Record that the server answered."""
        now = time.monotonic()
        self.silence, self.last = max(self.silence, now - self.last), now

    async def _wait(self, timeout_s: float) -> None:
        """Wait until both models answer again, at most `timeout_s`."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s and self.process.poll() is None:
            if await self._answers():
                self._heard()
                server = _triton(self.process.pid)
                if server is not None and server not in self.servers[-1:]:
                    self.servers.append(server)
                return
            await asyncio.sleep(0.5)
        self.silence = max(self.silence, time.monotonic() - self.last)

    async def _answers(self) -> bool:
        asked = Counter(self.counts)
        try:
            await self._encode(TEXTS[0])
            await self._decode(PROMPTS[:1], learn=True)
        except REFUSED_OR_LOST:
            return False
        finally:
            self.counts = asked
        return PROMPTS[0] in self.expected

    async def _encode_until(self, decoding: asyncio.Future[Any], client: int) -> None:
        """Run one client of the encoder until `decoding` ends."""
        text = TEXTS[client % len(TEXTS)]
        while not decoding.done():
            self.counts["sent"] += 1
            try:
                answer = await self._encode(text)
            except REFUSED_OR_LOST as error:
                refused = isinstance(error, AssertionError) and error.args == (429,)
                self.counts["refused" if refused else "failed"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            self._take(text, answer)

    def _take(self, sample: str, answer: str) -> None:
        self.counts["answered"] += 1
        if answer != self.expected[sample]:
            self.wrong.append(f"{sample!r}: {answer!r} instead of {self.expected[sample]!r}")

    async def _encode(self, text: str) -> str:
        body = json.dumps({"inputs": text}).encode()
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            status, content = await self.through.post("/predict", body)
        if status in (200, 429):
            self._heard()
        assert status == 200, status
        return str(sorted(entry["label"] for entry in json.loads(content)))

    async def _decode(self, prompts: Sequence[str], learn: bool = False) -> None:
        """Send all `prompts` on one stream, and read it to its end. `learn`: its answers are those expected later."""
        async with grpc.aio.insecure_channel(self.url) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            self.counts["sent"] += len(prompts)
            texts = [""] * len(prompts)
            left = set(range(len(prompts)))
            with suppress(grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
                writing = asyncio.ensure_future(_write(call, prompts))
                try:
                    while left:
                        async with asyncio.timeout(REQUEST_TIMEOUT_S):
                            message = await call.read()
                        if message is grpc.aio.EOF:
                            break
                        self._heard()
                        self._read(message, prompts, texts, left, learn)
                finally:
                    writing.cancel()
            self.counts["failed"] += len(left)

    def _read(
        self,
        message: service_pb2.ModelStreamInferResponse,
        prompts: Sequence[str],
        texts: list[str],
        left: set[int],
        learn: bool,
    ) -> None:
        index = int(message.infer_response.id)
        if message.error_message:
            refused = any(words in message.error_message for words in REFUSED)
            self.counts["refused" if refused else "failed"] += 1
            left.discard(index)
            return
        if message.infer_response.outputs:
            texts[index] += "".join(read_outputs(message.infer_response)["text_output"].strings())
        if message.infer_response.parameters[LAST].bool_param:
            left.discard(index)
            if learn:
                self.expected.setdefault(prompts[index], texts[index])
            self._take(prompts[index], texts[index])


async def _write(call: Any, prompts: Sequence[str]) -> None:
    for index, prompt in enumerate(prompts):
        request = service_pb2.ModelInferRequest(model_name="decoder", id=str(index))
        request.parameters[SAY_LAST].bool_param = True
        for name, kind, value in (
            ("text_input", "TYPE_STRING", prompt),
            ("max_tokens", "TYPE_INT32", MAX_TOKENS),
            ("ignore_eos", "TYPE_BOOL", True),
        ):
            add_tensor(request, Field(name, kind), [value], (1,))
        await call.write(request)
    await call.done_writing()


def _triton(parent: int) -> int | None:
    """Return the process id of the tritonserver that `parent` started last and that runs."""
    found = [pid for pid, words in _children(parent) if words[0].endswith("/tritonserver")]
    return max(found, default=None)


def _children(parent: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the process id and the command of each child."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                yield int(folder.name), (folder / "cmdline").read_text(errors="replace").split("\0")


def _kill(process: int) -> None:
    """End a process and those that it started."""
    for child, _ in tuple(_children(process)):
        _kill(child)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
