"""Other engines on the same work, each run by the interpreter of an environment of its own.

Each file is a program: WORK.json in (token ids of prompts, lengths of answers, concurrency, threads), one line of JSON
out: {"tokens_per_s", "first_token_ms", "inter_token_ms"} (clock.py). They import nothing of this project but that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PACKAGES = {
    "openvino_genai_peer": (
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "transformers==4.57.6",
        "torch==2.13.0",
    ),
    "llama_cpp_peer": ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors", "numpy<2.5"),
    "ctranslate2_peer": ("ctranslate2==4.8.5", "transformers==4.57.6", "torch==2.13.0"),
    "genai_peer": ("onnxruntime-genai==0.18.0", "transformers==5.23.0", "torch==2.13.0", "onnx_ir", "onnx"),
    "infinity_peer": ("infinity-emb[server,torch,optimum]==0.0.78",),  # a server; and Optimum's export
    "infinity_optimum_peer": (  # with the newest Optimum that finds an ONNX file by the path that infinity gives
        "infinity-emb[server,optimum]==0.0.78",
        "optimum[onnxruntime]==1.24.0",
        "transformers==4.48.3",
        "torch==2.13.0",
    ),
    "fastembed_peer": ("fastembed==0.9.1",),
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


def interpreter(peer: str, root: Path) -> Path:
    """A Python with what `peer` needs, made under `root` at its first use."""
    packages = PACKAGES[peer]
    return environment(peer, packages, root) if packages else Path(sys.executable)


def environment(name: str, packages: Sequence[str], root: Path) -> Path:
    """The Python of an environment `name` with these packages, made under `root` at its first use."""
    python = root / name / "bin" / "python"
    done = root / name / "installed"
    if not done.exists():
        venv.create(root / name, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        done.touch()
    return python


def run(peer: str, root: Path, *arguments: object) -> dict[str, Any]:
    """The figures of one peer; `error` holds its last line where it failed."""
    command = [str(interpreter(peer, root)), str(FOLDER / f"{peer}.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        return {"error": (result.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures
