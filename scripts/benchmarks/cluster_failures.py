"""Failures of a fleet's real processes under load: requests that were sent, failed, were cut short, or were wrong.

Two gateways over several Tritons, each Triton at a loopback address of its own, and clients that each wait for their
answer: two thirds ask for embeddings, the others for streams. A client whose gateway does not answer asks the other
one, as a load balancer would. In the middle half of each turn, one process is killed, stopped or slowed, other clients
fill the queues of one Triton, or its network is cut. The network can be cut where this process may have a network
namespace of its own.

Each answer is compared with the one that the model gives alone. The models compute in fp32, where an answer does not
depend on the batch: an encoder with random weights, and a language model that is trained for the tests, both so small
that two cores answer several hundred requests a second.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from builder.building.pipeline import build
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.serving.server.gateway import Process, gateway
from builder.serving.server.triton import TritonServer, free_ports, running
from scripts.benchmarks.flood import flooding
from tests.tiny_encoders import make_checkpoint
from tests.trained import language_model

CLIENTS = 12
TOKENS = 8  # of each stream
QUEUE = 16  # requests that may wait for a model: more than the clients send to one Triton
WORDS = {"embedding": 24, "stream": 8}  # most of a text, by the kind of request
SIMILARITY = 0.99999  # least cosine of an embedding to that of the text alone
SLOW_CYCLE_S, SLOW_SHARE = 0.1, 0.1  # a slow Triton runs for this share of each cycle
CLONE_NEWNET = 0x40000000  # of unshare(2)
TIMEOUT_S = 120.0
ERRORS = (OSError, http.client.HTTPException)  # of a connection whose gateway is gone
OUTCOMES = ("right", "failed", "cut", "wrong")  # of a request


def make_models(folder: Path) -> None:
    """Build the models of both kinds of request where they are missing."""
    options: dict[str, Any] = {"output": folder, "threads": 1, "serving": {"queue": {"max_size": QUEUE}}}
    if not (folder / "embeds").exists():
        task = "feature-extraction"
        with tempfile.TemporaryDirectory() as checkpoint:
            make_checkpoint(Path(checkpoint), "bert", task)
            build(make_spec(model=checkpoint, name="embeds", task=task, pooling="mean", **options))
    if not (folder / "writes").exists():
        build(make_spec(model=str(language_model()[0]), name="writes", **options))


def measure(folder: Path, tritons: int, seconds: float, failures: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the outcome of these kinds of failure, in turns of so many seconds; `folder`: that of `make_models`."""
    is_isolated = isolate_network()
    with ExitStack() as stack:
        fleet = Fleet(folder, tritons, stack)
        answers = [{text: fleet.ask(0, kind, text) for text in TEXTS} for kind in KINDS]
        contexts = {name: context for name, context in FAILURES.items() if name in failures}
        if not is_isolated:
            contexts.pop("a Triton's network is cut", None)
        return {name: Turn(fleet, answers).run(partial(context, fleet), seconds) for name, context in contexts.items()}


def isolate_network() -> bool:
    """Give this process and its later children a network of their own, with the loopback device alone.

    Return False if that is not permitted.
    """
    if shutil.which("ip") is None or ctypes.CDLL(None).unshare(CLONE_NEWNET):
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


class ThreadConnections(threading.local):
    """Connections of one thread, by the number of the gateway."""

    def __init__(self) -> None:
        self.of: dict[int, http.client.HTTPConnection] = {}


class Fleet:
    """Tritons and two gateways over them. Each failure is a context: of the second Triton, or of the first gateway."""

    def __init__(self, folder: Path, tritons: int, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.hosts = [f"127.0.0.{number}" for number in range(1, tritons + 1)]
        self.triton_ports = [free_ports(host) for host in self.hosts]
        self.tritons = [self._start_triton(number) for number in range(tritons)]
        self.ports = [free_ports().http for _ in range(2)]
        self.gateways = [self._start_gateway(number) for number in range(2)]
        self.connections = ThreadConnections()

    def _start_triton(self, number: int) -> TritonServer:
        host, ports = self.hosts[number], self.triton_ports[number]
        return self.stack.enter_context(running(self.folder, host, ports))

    def _start_gateway(self, number: int) -> Process:
        urls = ",".join(triton.url for triton in self.tritons)
        return self.stack.enter_context(gateway(urls, "127.0.0.1", self.ports[number], log=subprocess.DEVNULL))

    def ask(self, gateway: int, kind: str, text: str) -> Any:
        """Return the embedding, or what `read_stream` returns. Raises one of ERRORS, Cut, or Failed."""
        path, body = KINDS[kind]
        asked = {"input" if kind == "embedding" else "prompt": " ".join(text.split()[: WORDS[kind]])}
        connection = self._connection(gateway)
        try:
            connection.request("POST", path, json.dumps({**body, **asked}), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except http.client.IncompleteRead as error:
            connection.close()
            raise (Cut if b"data:" in error.partial else http.client.HTTPException)() from error
        except ERRORS:
            connection.close()
            raise
        if response.status != 200:
            raise Failed(content.decode()[:300])
        return read_embedding(content) if kind == "embedding" else read_stream(content)

    def _connection(self, gateway: int) -> http.client.HTTPConnection:
        """Return this thread's connection to a gateway, which it keeps; once closed, the next request opens it."""
        kept = self.connections.of
        if gateway not in kept:
            kept[gateway] = http.client.HTTPConnection("127.0.0.1", self.ports[gateway], timeout=TIMEOUT_S)
        return kept[gateway]

    @contextmanager
    def triton_killed(self) -> Iterator[None]:
        os.killpg(self.tritons[1].process.pid, signal.SIGKILL)
        yield
        self.tritons[1] = self._start_triton(1)

    @contextmanager
    def gateway_killed(self) -> Iterator[None]:
        self.gateways[0].kill()
        yield
        self.gateways[0] = self._start_gateway(0)

    @contextmanager
    def triton_stopped(self) -> Iterator[None]:
        group = self.tritons[1].process.pid
        os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(group, signal.SIGCONT)

    @contextmanager
    def triton_slow(self) -> Iterator[None]:
        group, ended = self.tritons[1].process.pid, threading.Event()

        def slow_down() -> None:
            while not ended.is_set():
                os.killpg(group, signal.SIGSTOP)
                time.sleep(SLOW_CYCLE_S * (1 - SLOW_SHARE))
                os.killpg(group, signal.SIGCONT)
                time.sleep(SLOW_CYCLE_S * SLOW_SHARE)

        slowing = threading.Thread(target=slow_down)
        slowing.start()
        try:
            yield
        finally:
            ended.set()
            slowing.join()

    def triton_full(self) -> AbstractContextManager[None]:
        return flooding(self.tritons[1].url, "embeds", "writes")

    @contextmanager
    def network_cut(self) -> Iterator[None]:
        """Drop the packets of open connections to the second Triton; new connections fail at once."""
        route = ["blackhole", f"{self.hosts[1]}/32", "table", "local"]
        subprocess.run(["ip", "route", "add", *route], check=True)
        try:
            yield
        finally:
            subprocess.run(["ip", "route", "del", *route], check=True)


FAILURES: dict[str, Callable[[Fleet], AbstractContextManager[None]]] = {
    "none": lambda _: nullcontext(),
    "a Triton is killed": Fleet.triton_killed,
    "a gateway is killed": Fleet.gateway_killed,
    "a Triton is stopped": Fleet.triton_stopped,
    "a Triton has a tenth of its speed": Fleet.triton_slow,
    "the queues of a Triton are full": Fleet.triton_full,
    "a Triton's network is cut": Fleet.network_cut,
}


class Failed(Exception):
    """A request that got an error, although it could have been sent to another Triton."""


class Cut(Exception):
    """A stream that ended early after its first piece, which cannot be sent again."""


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding": ("/v1/embeddings", {"model": "embeds"}),
    "stream": (
        "/v1/completions",
        {
            "model": "writes",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
}


class Turn:
    """Clients for some seconds. `answers`: of each kind, the answer to each text alone."""

    def __init__(self, fleet: Fleet, answers: Sequence[dict[str, Any]]) -> None:
        self.fleet, self.answers = fleet, answers
        self.counted: list[str] = []  # "sent" and "sent_again", and the outcomes
        self.seconds: list[float] = []
        self.errors: list[str] = []
        self.stopping = threading.Event()

    def run(self, failure: Callable[[], Any], seconds: float) -> dict[str, Any]:
        """Return what became of the requests. The failure lasts for the middle half of the time."""
        clients = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            time.sleep(seconds / 4)
            with failure():
                time.sleep(seconds / 2)
            time.sleep(seconds / 4)
        finally:
            self.stopping.set()
            for client in clients:
                client.join()
        counts = Counter(self.counted)
        if counts["sent"] != sum(counts[outcome] for outcome in OUTCOMES):
            raise RuntimeError(f"some requests have no outcome: {dict(counts)}")
        counted = {name: counts[name] for name in ("sent", "failed", "cut", "wrong", "sent_again")}
        p50, p99, longest = np.quantile(self.seconds, [0.5, 0.99, 1.0]).round(3).tolist()
        return {**counted, "p50_s": p50, "p99_s": p99, "max_s": longest, "errors": self.errors[:5]}

    def _client(self, number: int) -> None:
        kind, turn = list(KINDS)[number % 3 == 0], number
        while not self.stopping.is_set():
            turn += 1
            text, started = TEXTS[turn % len(TEXTS)], time.monotonic()
            self.counted.append("sent")
            outcome = "right"
            try:
                answer, alone = self._ask(number, kind, text), self.answers[list(KINDS).index(kind)][text]
                if wrong := _difference(kind, answer, alone):
                    outcome = "wrong"
                    self.errors.append(f"wrong {kind}: {wrong}")
            except Cut:
                outcome = "cut"
            except Exception as error:  # such as an answer that is not JSON
                outcome = "failed"
                self.errors.append(repr(error))
            self.counted.append(outcome)
            self.seconds.append(time.monotonic() - started)

    def _ask(self, number: int, kind: str, text: str) -> Any:
        try:
            return self.fleet.ask(number % 2, kind, text)
        except ERRORS:
            self.counted.append("sent_again")
            return self.fleet.ask(1 - number % 2, kind, text)


def _difference(kind: str, answer: Any, alone: Any) -> str | None:
    """Return how an answer differs from that of the text alone; None if it is right."""
    if kind == "embedding":
        cosine = float(answer @ alone)
        return None if cosine >= SIMILARITY else f"cosine {cosine}"
    return None if answer == alone else f"{answer}, alone {alone}"


def read_embedding(content: bytes) -> Any:
    """Return the embedding in an answer, of length 1."""
    vector = np.array(json.loads(content)["data"][0]["embedding"])
    return vector / np.linalg.norm(vector)


def read_stream(content: bytes) -> tuple[str, int]:
    """Return the text of a stream and its number of tokens. Raises Cut or Failed if it ends with an error."""
    *events, last = [event.removeprefix(b"data: ") for event in content.split(b"\n\n") if event]
    if last != b"[DONE]":
        raise (Cut if events else Failed)(last.decode()[:300])
    *pieces, end = map(json.loads, events)
    return "".join(choice["text"] for piece in pieces for choice in piece["choices"]), end["usage"]["completion_tokens"]
