"""Build small models, serve them, run every client on them, and record the outcomes."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.options import make_spec
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import free_ports, running
from scripts.benchmarks.peers import PeerError, environment
from scripts.interoperability import CLIENTS
from tests.decoders import make_decoder_checkpoint
from tests.tiny_encoders import make_checkpoint

FOLDER = Path(__file__).parent
CLIENT_TIMEOUT_S = 400  # of one client
LENGTH = 4096  # tokens of a prompt and its answer
LABELS = {0: "bad", 1: "fair", 2: "good"}
TEMPLATE = (  # Hermes' notation of calls, in as few tokens as may be
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}{% for m in messages %}"
    "<{{ m.role }}> {{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n"
    "</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/interop")
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CLIENTS)}; all, unless given")
    parser.add_argument(
        "--environments", type=Path, default=Path(".interop"), help="default .interop; made at first use"
    )
    parser.add_argument("--output", type=Path, help="write what passed here, as JSON; other clients' results stay")
    options = parser.parse_args()
    unknown = [name for name in options.clients if name not in CLIENTS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(CLIENTS)}")
    pythons = {}
    for name in options.clients or CLIENTS:
        try:
            pythons[name] = environment(name, CLIENTS[name], options.environments)
        except PeerError as error:  # the results of others count, too
            print(f"{name} is left out: {error}")
    with tempfile.TemporaryDirectory() as scratch:
        folder, checkpoint = make_models(Path(scratch))
        port = free_ports().http
        with running(folder) as server, gateway(server.url, "127.0.0.1", port):
            work = {
                "gateway": f"http://127.0.0.1:{port}",
                "triton": f"http://{server.host}:{server.ports.http}",
                "grpc": server.url,
                "tokenizer": str(checkpoint),
                **{kind: kind for kind in ("writes", "embeds", "ranks", "labels")},
                "classes": list(LABELS.values()),
            }
            for name, python in pythons.items():
                outcomes = {name: attempt(name, python, work)}
                show(outcomes)
                if options.output:
                    record(options.output, outcomes)


def record(file: Path, outcomes: dict[str, Any]) -> None:
    """Write results into `file`, in the order of CLIENTS, beside those of other clients."""
    known = {**(json.loads(file.read_text("utf-8")) if file.exists() else {}), **outcomes}
    ordered = {name: known[name] for name in CLIENTS if name in known}
    file.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", "utf-8")


def make_models(scratch: Path) -> tuple[Path, Path]:
    """Build a chat decoder with tools, embeddings, a reranker and a classifier.

    Returns the repository, and the checkpoint of the first.
    """
    folder = scratch / "repository"
    decoder = make_decoder_checkpoint(scratch / "writes", "llama", chat=True, max_position_embeddings=LENGTH)
    settings = decoder / "tokenizer_config.json"
    (decoder / "chat_template.jinja").write_text(TEMPLATE)
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    build(make_spec(model=str(decoder), name="writes", output=folder, slots=8, max_length=LENGTH))
    embeds = make_checkpoint(scratch / "embeds", "bert", "sentence-similarity")
    build(make_spec(model=str(embeds), name="embeds", task="sentence-similarity", output=folder, pooling="mean"))
    ranks = make_checkpoint(scratch / "ranks", "bert", "text-ranking", {0: "LABEL_0"})
    build(make_spec(model=str(ranks), name="ranks", task="text-ranking", output=folder))
    labels = make_checkpoint(scratch / "labels", "bert", "text-classification", LABELS)
    options = {"task": "text-classification", "serving": {"dynamo": True}}
    build(make_spec(model=str(labels), name="labels", output=folder, **options))
    return folder, decoder


def attempt(name: str, python: Path, work: dict[str, Any]) -> dict[str, Any]:
    """Run a client. Return its version, and each check with its outcome."""
    program = [str(python), str(FOLDER / "clients" / f"{name}_client.py"), json.dumps(work)]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"version": version(name, python), "checks": {"ends": f"not within {CLIENT_TIMEOUT_S} s"}}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"checks"')]
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"version": version(name, python), "checks": {"starts": reason[:300]}}
    return {"version": version(name, python), **json.loads(lines[-1])}


def version(name: str, python: Path) -> str:
    """Return the version of the client in its environment."""
    package = CLIENTS[name][0].split("==")[0].split("[")[0]
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def show(outcomes: dict[str, Any]) -> None:
    console = Console(width=140)
    for name, result in outcomes.items():
        for check, outcome in result["checks"].items():
            console.print(f"{name} {result['version']}: {check}: {outcome}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
