"""vLLM's load generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import WORK, check, report


def benchmark(route: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "benchmarks.json"
        command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={WORK['gateway']},model=writes,request_format={route}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={WORK['tokenizer']}", "--profile", "kind=synchronous"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
        command += ["--constraint", "kind=max_requests,count=6", "--output", f"kind=json,path={results}"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        assert done.returncode == 0, (done.stderr.strip().splitlines() or done.stdout.strip().splitlines())[-1]
        (benchmark,) = json.loads(results.read_text())["benchmarks"]
        requests = benchmark["requests"]
        assert len(requests["successful"]) == 6, str(requests["errored"][:1])


@check("chat, streamed")
def _() -> None:
    benchmark("/v1/chat/completions")


@check("completions, streamed")
def _() -> None:
    benchmark("/v1/completions")


report()
