"""Extend uvicorn's HTTP/1.1 protocol by a time limit for receiving a request.

uvicorn only limits how long a connection may be idle after an answer: one that sends no request, half of its headers or
half of its body would stay open forever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_S = 60.0  # from the connection, or the first byte of a later request, to the last byte of the request


class Protocol(HttpToolsProtocol):
    """HTTP protocol that closes a connection whose next request is not complete in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._expect()  # the data may not be a request, such as empty lines
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._expect()  # the data before it may have ended another request
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def _expect(self) -> None:
        """Start the timer unless it is already running."""
        if self._late is None:
            self._late = self.loop.call_later(REQUEST_S, self._close)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        """Close the connection; if an earlier request is still being answered, check again later."""
        self._late = None
        answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if self.pipeline or answering:
            self._expect()
        elif not self.transport.is_closing():
            self.transport.close()
