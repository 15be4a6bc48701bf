"""A proxy that breaks connections after a number of bytes, a few times."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Faulty:
    """Proxy to `port` that closes a connection `cuts` times, each after `after` bytes of the answer."""

    port: int
    after: int
    cuts: int
    cut: int = 0
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    threads: list[threading.Thread] = field(default_factory=list)
    open: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def __enter__(self) -> Faulty:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        _end(self.listener, *self.open)
        for thread in self.threads:
            thread.join()
        for one in (self.listener, *self.open):
            one.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self.threads.append(threading.Thread(target=target, args=arguments))
        self.threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port))
                self.open += [client, server]
                self._start(self._copy, client, server, False)
                self._start(self._copy, server, client, True)

    def _copy(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while block := source.recv(1 << 14):
                seen += len(block)
                if answers and seen > self.after and self.cut < self.cuts:
                    self.cut += 1
                    break
                target.sendall(block)
        _end(source, target)


def _end(*sockets: socket.socket) -> None:
    """Close connections, and wake the threads that wait for them."""
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
