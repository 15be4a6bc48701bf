"""Registries: Debian's docker-registry, and a strict stand-in that can also ask for tokens and fail."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.http_servers import http_server
from tests.repository.stores.emulators import HOST, answers, free_port, running

PROGRAM = shutil.which("docker-registry")
USER, PASSWORD, TOKEN = "reader", "secret", "a-token"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
HTPASSWD = f"{USER}:$2y$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\n"  # of PASSWORD
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@contextlib.contextmanager
def docker_registry(folder: Path, is_protected: bool = False) -> Iterator[int]:
    """Yield the port of Debian's registry, which stores in `folder`. Skips the test if it is not installed."""
    if PROGRAM is None:
        pytest.skip("needs a registry: apt-get install --no-install-recommends docker-registry")
    (folder / "htpasswd").write_text(HTPASSWD)
    auth = {"auth": {"htpasswd": {"realm": "models", "path": str(folder / "htpasswd")}}} if is_protected else {}
    while True:
        port = free_port()
        config = {
            "version": "0.1",
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": f"{HOST}:{port}"},
            **auth,
        }
        (folder / "config.yml").write_text(json.dumps(config))
        process = subprocess.Popen([PROGRAM, "serve", str(folder / "config.yml")], stderr=subprocess.DEVNULL)
        with running(process):
            if answers(process, port):
                yield port
                return


@dataclass
class StandIn:
    """A registry in memory.

    `asks_for_tokens`: only requests with TOKEN are answered, which BASIC gets; `fails`: answers of 503 that are left by
    method; `ignores_ranges`: whole blobs are
    answered; `requests`: how many of each method and kind of path were answered.
    """

    port: int = 0
    asks_for_tokens: bool = False
    ignores_ranges: bool = False
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    uploads: set[str] = field(default_factory=set)
    fails: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)

    def problem(self, manifest: bytes) -> str | None:
        """Return the code of the error that a registry answers to a manifest; None if it takes it."""
        document = json.loads(manifest)
        if document["mediaType"] == INDEX:
            return None
        if document["mediaType"] != MANIFEST or document["schemaVersion"] != 2:
            return "MANIFEST_INVALID"
        for descriptor in (document["config"], *document["layers"]):
            if len(self.blobs.get(descriptor["digest"], b"")) != descriptor["size"]:
                return "MANIFEST_BLOB_UNKNOWN"
        return None


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """Yield a registry in memory that holds the repository org/front."""
    registry = StandIn()
    with http_server(_handler(registry)) as registry.port:
        yield registry


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _handler(registry: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def refuse(self, status: int, code: str, **headers: str) -> None:
            self.answer(status, json.dumps({"errors": [{"code": code, "message": code.lower()}]}).encode(), **headers)

        def route(self) -> None:
            parts, content = urlsplit(self.path), self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if parts.path == "/token":
                return self.token()
            match = re.fullmatch(r"/v2/org/front/(blobs/uploads|blobs|manifests|tags)/(.*)", parts.path)
            if match is None:
                return self.refuse(404, "NAME_UNKNOWN")
            if registry.asks_for_tokens and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                realm = f'Bearer realm="http://{HOST}:{registry.port}/token",service="models",scope="org/front:pull"'
                return self.refuse(401, "UNAUTHORIZED", WWW_Authenticate=realm)
            kind, rest = match[1], match[2]
            if registry.fails[self.command] > 0:
                registry.fails[self.command] -= 1
                return self.refuse(503, "UNAVAILABLE")
            registry.requests[f"{self.command} {kind}"] += 1
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            actions = {"blobs": self.blob, "manifests": self.manifest, "tags": self.tags}
            return self.upload(rest, query, content) if kind == "blobs/uploads" else actions[kind](rest, content)

        def token(self) -> None:
            if self.headers.get("Authorization") != BASIC:
                return self.refuse(401, "UNAUTHORIZED")
            self.answer(200, json.dumps({"token": TOKEN}).encode())

        def upload(self, name: str, query: dict[str, str], content: bytes) -> None:
            if self.command == "POST" and not name:
                registry.uploads.add(started := uuid.uuid4().hex)
                return self.answer(202, Location=f"/v2/org/front/blobs/uploads/{started}?state=x")
            if self.command != "PUT" or name not in registry.uploads or query.get("state") != "x":
                return self.refuse(404, "BLOB_UPLOAD_UNKNOWN")
            registry.uploads.remove(name)
            if query.get("digest") != _digest(content):
                return self.refuse(400, "DIGEST_INVALID")
            registry.blobs[query["digest"]] = content
            self.answer(201)

        def blob(self, digest: str, _: bytes) -> None:
            content = registry.blobs.get(digest)
            if content is None:
                return self.refuse(404, "BLOB_UNKNOWN")
            first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if first is None or registry.ignores_ranges:
                return self.answer(200, content)
            self.answer(206, content[int(first[1]) :])

        def manifest(self, tag: str, content: bytes) -> None:
            if self.command == "PUT":
                if self.headers["Content-Type"] != json.loads(content)["mediaType"]:
                    return self.refuse(400, "MANIFEST_INVALID")
                if problem := registry.problem(content):
                    return self.refuse(400, problem)
                registry.manifests[tag] = content
                return self.answer(201)
            found = registry.manifests.get(tag)
            if found is None or (kind := json.loads(found)["mediaType"]) not in self.headers.get("Accept", ""):
                return self.refuse(404, "MANIFEST_UNKNOWN")
            self.answer(200, found, Content_Type=kind, Docker_Content_Digest=_digest(found))

        def tags(self, _: str, __: bytes) -> None:
            self.answer(200, json.dumps({"name": "org/front", "tags": [*registry.manifests]}).encode())

        do_GET = do_HEAD = do_PUT = do_POST = route

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler
