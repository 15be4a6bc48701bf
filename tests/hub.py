"""A stand-in of the Hub on this machine: one repository, and what huggingface_hub asks of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.http_servers import http_server

COMMIT = "a" * 40


@contextmanager
def hub(name: str, files: Mapping[str, bytes], gated: bool = False) -> Iterator[str]:
    """Serve a repository with these files, and yield the address. `gated`: list the files, but give none of them."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.wfile.write(self.answer())

        def answer(self) -> bytes:
            sent: dict[str, str] = {}
            file = self.path.removeprefix(f"/{name}/resolve/{COMMIT}/")
            model = f"/api/models/{name}"
            if self.path in (model, f"{model}/revision/main", f"{model}/revision/{COMMIT}"):
                content = json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode()
            elif self.path.startswith(f"{model}/tree/"):
                tree = [
                    {"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])} for path in files
                ]
                content = json.dumps(tree).encode()
            elif file in files and not gated:
                content, sent = files[file], {"ETag": f'"{_oid(files[file])}"', "X-Repo-Commit": COMMIT}
            else:
                self.send_response(403 if file in files else 404)
                self.send_header("X-Error-Code", "GatedRepo" if file in files else "RevisionNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return b""
            self.send_response(200)
            for header, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **sent,
            }.items():
                self.send_header(header, value)
            self.end_headers()
            return content

        def log_message(self, *_: object) -> None:
            pass

    with http_server(Handler) as port:
        yield f"http://127.0.0.1:{port}"


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
