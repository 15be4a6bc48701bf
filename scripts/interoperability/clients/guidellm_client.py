"""vLLM's load generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import WORK, check, report


@check("benchmark, synthetic prompts")
def _() -> None:
    with tempfile.TemporaryDirectory() as place:
        results = Path(place) / "benchmarks.json"
        command = [str(Path(sys.executable).parent / "guidellm"), "benchmark", "--target", WORK["gateway"]]
        command += ["--model", "writes", "--processor", WORK["tokenizer"], "--profile", "synchronous"]
        command += ["--data", "prompt_tokens=32,output_tokens=8", "--max-requests", "6", "--output-path", str(results)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        assert done.returncode == 0, (done.stderr.strip().splitlines() or done.stdout.strip().splitlines())[-1]
        (benchmark,) = json.loads(results.read_text())["benchmarks"]
        assert len(benchmark["requests"]["successful"]) == 6


report()
