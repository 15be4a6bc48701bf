"""Keep a server running: restart processes and models that died, up to a limit.

If a model's Python process is killed, Triton keeps a model that is ready and fails every request; a request that the
server itself cannot handle ends it; a server that does not answer is killed (builder.serving.server.heartbeat). Knows
processes, model control and metrics; knows no models.
"""

from __future__ import annotations

import math
import re
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builder.common.errors import BuilderError, ServeError
from builder.repository.liveness import NAME as LIVENESS
from builder.serving.server.backoff import Backoff, restart_backoff
from builder.serving.server.control import LOAD_TIMEOUT_S, Control, server_reason, versions_in
from builder.serving.server.heartbeat import heartbeat
from builder.serving.server.process import describe_exit
from builder.serving.server.refusals import refuse_unsigned
from builder.serving.server.stubs import Stub, Stubs
from builder.serving.server.triton import TritonServer, last_error

POLL_S = 1.0
INDEX_TIMEOUT_S = 10.0  # models are not watched while a server lists its versions
FAILED_LOOP = re.compile(r'^build_repo_healthy\{model="([^"]+)"[^}]*\} 0(?:\.0+)?$', re.MULTILINE)
SETTLING_S = 5.0  # after a load, until a model publishes its own metrics

Say = Callable[[str], None]


@dataclass
class Watcher:
    """Watches the models of one server, which were loaded at `started`. `reloads`: how often each was reloaded."""

    server: TritonServer
    say: Say
    started: float = field(default_factory=time.monotonic)
    reloads: dict[str, int] = field(default_factory=dict)
    _backoffs: dict[str, Backoff] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)  # by model: when to load it again
    _loaded: dict[str, float] = field(default_factory=dict)  # by model: when it was reloaded

    def __post_init__(self) -> None:
        self._stubs = Stubs(self.server.process.pid)

    def watch(self) -> int:
        """Check once a second until the server ends, except models loaded on demand. Return its exit status."""
        while (status := self.server.process.poll()) is None:
            if not self.server.on_demand:
                self.look()
            time.sleep(POLL_S)
        return status

    def look(self) -> None:
        """Unload models that died, so that their readiness shows it, and reload them when they are due."""
        now = time.monotonic()
        for name, reason in {**self._failed_loops(now), **self._died()}.items():
            if name not in self._due:
                self._unload(name, reason, now)
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._load(name)

    def _died(self) -> dict[str, str]:
        """Return models with a dead process that was not reaped, and why.

        Omits processes of an old version while another version answers, since nothing is missing then.
        """
        self._stubs.find()
        died = [stub for stub in self._stubs.died() if not self._is_replaced(stub)]
        return {stub.model: f"its process {stub.pid} died" for stub in died}

    def _is_replaced(self, stub: Stub) -> bool:
        """Return True if Triton has another version of the model ready, and this one no longer."""
        try:
            with grpc.InferenceServerClient(self.server.url) as client:
                ready = versions_in(client, stub.model, ("READY",), INDEX_TIMEOUT_S)
        except InferenceServerException:
            return False
        return bool(ready) and int(stub.version) not in ready

    def _failed_loops(self, now: float) -> dict[str, str]:
        """Return models whose metrics report a failed decode loop."""
        try:
            with urllib.request.urlopen(self.server.metrics_url, timeout=2) as response:
                failed = FAILED_LOOP.findall(response.read().decode())
        except OSError:
            return {}
        settled = [name for name in failed if now - self._loaded.get(name, self.started) > SETTLING_S]
        return dict.fromkeys(settled, "its decode loop failed")

    def _unload(self, name: str, reason: str, now: float) -> None:
        if not self.server.controlled:
            self.say(f"{name}: {reason}; the server is started again, for on this address no model is loaded alone")
            self.server.process.terminate()
            return
        backoff = self._backoffs.setdefault(name, restart_backoff())
        delay = backoff.fail(now, first_at_once=True)
        if math.isinf(delay):
            attempts = f"{backoff.max_failures} attempts"
            self.say(f"{name}: {reason} once more: it stays unloaded after {attempts}; -v shows Triton's log")
        else:
            self.say(f"{name}: {reason}; it is loaded again" + (f" in {delay:g} s" if delay else ""))
            self._due[name] = now + delay
        self._control("unload", name)

    def _load(self, name: str) -> None:
        started = time.monotonic()
        problem = self._control("load", name)
        now = time.monotonic()
        if problem:
            self._unload(name, f"it does not load ({problem})", now)
            return
        self._loaded[name] = now
        self.reloads[name] = self.reloads.get(name, 0) + 1
        self.say(f"{name}: loaded again in {now - started:.1f} s, for the {_ordinal(self.reloads[name])} time")

    def _control(self, verb: str, name: str) -> str:
        """Load or unload a model. Returns the problem in one line, "" if there is none."""
        try:
            if verb == "load" and self.server.repository is not None and name != LIVENESS:
                if self.server.verify_key is not None:
                    refuse_unsigned(self.server.repository, self.server.verify_key, [name])
                with Control(self.server.url, self.server.repository) as control:
                    control.again(name)
                return ""
            with grpc.InferenceServerClient(self.server.url) as client:
                act = client.load_model if verb == "load" else client.unload_model
                act(name, client_timeout=LOAD_TIMEOUT_S)
        except InferenceServerException as error:
            return server_reason(error)
        except BuilderError as error:
            return str(error)
        return ""


def keep_running(
    start: Callable[[], AbstractContextManager[TritonServer]], started: Callable[[TritonServer], None], say: Say
) -> None:
    """Run a server, watch its models, and restart it when it ends by itself.

    Raises ServeError if it does not start, or ends too often in a row.
    """
    backoff = restart_backoff()
    while True:
        try:
            with start() as server:
                started(server)
                ended = _watch_until_end(server, say)
        except ServeError as error:
            if not backoff.failures:
                raise
            ended = str(error)
        delay = backoff.fail(time.monotonic(), first_at_once=True)
        if math.isinf(delay):
            raise ServeError(f"{ended}; that was the {_ordinal(backoff.failures)} time in a row")
        say(f"{ended}; it is started again" + (f" in {delay:g} s" if delay else ""))
        time.sleep(delay)


def _watch_until_end(server: TritonServer, say: Say) -> str:
    """Watch a server until it ends; return the reason."""
    with heartbeat(server, say) as beats:
        status = Watcher(server, say).watch()
    if beats.killed:
        return "Triton did not answer and was killed"
    return f"Triton ended by itself, {describe_exit(status)}: {last_error(server.log)}"


def _ordinal(number: int) -> str:
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{last}"
