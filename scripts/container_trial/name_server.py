"""Name server of a cluster: it answers the name of a headless service with the addresses of its ready pods."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PORT = 53
IP_FREEBIND = 15  # of linux/in.h
TTL_S = 5  # CoreDNS' own for names of a cluster
ADDRESS, INTERNET = 1, 1  # type A and class IN: RFC 1035, 3.2
HEADER = struct.Struct("!6H")  # id, flags, and the counts of questions, answers, authorities and additional records
ANSWER = struct.Struct("!HHHIH4s")  # pointer to the name of the question, type, class, seconds, length and address
NAME_OF_QUESTION = 0xC000 | HEADER.size
AUTHORITATIVE, NO_SUCH_NAME = 0x8580, 0x8583


class HeadlessService(socketserver.ThreadingUDPServer):
    """Answers for the service `name`. `addresses`: IPv4 addresses of its ready pods."""

    daemon_threads = True

    def __init__(self, name: str, host: str, port: int = PORT) -> None:
        super().__init__((host, port), _Question, bind_and_activate=False)
        self.name, self.addresses = name.encode(), set[str]()
        self.socket.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)  # a bridge has its address while a container runs
        self.server_bind()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answer while the block runs."""
        with self:
            threading.Thread(target=self.serve_forever, daemon=True).start()
            try:
                yield
            finally:
                self.shutdown()

    def answer(self, packet: bytes) -> bytes:
        """Return the response to a packet with one question; the domain behind the name is any.

        Source: RFC 1035, 4.1.
        """
        number = HEADER.unpack_from(packet)[0]
        labels, end = [], HEADER.size
        while length := packet[end]:
            labels.append(packet[end + 1 : end + 1 + length])
            end += 1 + length
        end += 5  # the root, type and class
        kind = struct.unpack_from("!H", packet, end - 4)[0]
        is_known = labels[:1] == [self.name]
        addresses = sorted(self.addresses) if is_known and kind == ADDRESS else []
        flags = AUTHORITATIVE if is_known else NO_SUCH_NAME
        answers = [
            ANSWER.pack(NAME_OF_QUESTION, ADDRESS, INTERNET, TTL_S, 4, socket.inet_aton(address))
            for address in addresses
        ]
        return HEADER.pack(number, flags, 1, len(answers), 0, 0) + packet[HEADER.size : end] + b"".join(answers)


class _Question(socketserver.BaseRequestHandler):
    server: HeadlessService

    def handle(self) -> None:
        packet, connection = self.request
        connection.sendto(self.server.answer(packet), self.client_address)
