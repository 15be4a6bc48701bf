"""Send inference requests to a Triton regularly, and kill a server whose process lives but does not answer.

The watcher of the process restarts it. builder.repository.liveness explains why it takes an inference to find out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from tritonclient.grpc import service_pb2_grpc

from builder.repository.config.arguments import EXIT_TIMEOUT_S
from builder.repository.liveness import liveness_request
from builder.serving.server.triton import TritonServer

PERIOD_S = 2.0
REQUEST_TIMEOUT_S = 8.0  # of one request
MAX_TIMEOUTS = 2  # in a row: a silent server is killed 20 s after its last answer, 2 * (PERIOD_S + REQUEST_TIMEOUT_S)
MAX_SILENCE_S = EXIT_TIMEOUT_S + 5  # a server that refuses may be draining, or reloading the liveness model
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
)


class Heartbeat(threading.Thread):
    """Thread that sends requests to `server`, which has the liveness model, and kills it if it is silent.

    `say` prints a line.
    """

    def __init__(self, server: TritonServer, say: Callable[[str], None]) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.server, self.say = server, say
        self.stopping = threading.Event()
        self.killed = False

    def run(self) -> None:
        last, misses = time.monotonic(), 0
        with grpc.insecure_channel(self.server.url, options=CHANNEL_OPTIONS) as channel:
            ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
            while not self.stopping.wait(PERIOD_S):
                try:
                    ask(liveness_request(), timeout=REQUEST_TIMEOUT_S, wait_for_ready=True)
                    last, misses = time.monotonic(), 0
                except grpc.RpcError as error:
                    misses = misses + 1 if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else 0
                silent_s = time.monotonic() - last
                if misses >= MAX_TIMEOUTS or silent_s >= MAX_SILENCE_S:
                    self._kill(silent_s)
                    return

    def _kill(self, silent_s: float) -> None:
        if self.stopping.is_set() or self.server.process.poll() is not None:
            return  # it is stopping, or has ended
        self.killed = True
        self.say(f"Triton has answered no inference for {silent_s:.0f} s, though its process lives: it is killed")
        self.server.process.kill()


@contextmanager
def heartbeat(server: TritonServer, say: Callable[[str], None]) -> Iterator[Heartbeat]:
    """Send requests to a server until the end of the block."""
    thread = Heartbeat(server, say)
    thread.start()
    try:
        yield thread
    finally:
        thread.stopping.set()
