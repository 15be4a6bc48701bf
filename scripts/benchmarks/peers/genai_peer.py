"""onnxruntime-genai: WORK.json CHECKPOINT int4|fp32. Its Generator for one request at a time; for more its
Engine, which batches continuously."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai


def main() -> None:
    work, checkpoint, kind = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    target = checkpoint / f"genai-{kind}"
    if not (target / "genai_config.json").exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(target)]
        subprocess.run([*command, "-p", kind, "-e", "cpu", "-c", str(target / "cache")], check=True, stdout=sys.stderr)
    path = target / "genai_config.json"
    config = json.loads(path.read_text())
    options = config["model"]["decoder"].setdefault("session_options", {})
    options["intra_op_num_threads"] = work["threads"]
    config["engine"] = {"dynamic_batching": {"block_size": 256, "gpu_utilization_factor": 0.9, "max_batch_size": 16}}
    if work["concurrency"] == 1:
        del config["engine"]
    path.write_text(json.dumps(config))
    model = genai.Model(str(target))
    first: list[float] = []

    def serve_one_by_one(requests: list[dict]) -> None:
        for asked in requests:
            params = genai.GeneratorParams(model)
            total = len(asked["prompt"]) + asked["new_tokens"]
            params.set_search_options(do_sample=False, max_length=total, min_length=total)
            begun, generator = time.perf_counter(), genai.Generator(model, params)
            generator.append_tokens(np.array(asked["prompt"], np.int32))
            for place in range(asked["new_tokens"]):
                generator.generate_next_token()
                if not place:
                    first.append(time.perf_counter() - begun)

    def serve_together(requests: list[dict]) -> None:
        engine = genai.Engine(model)
        waiting, running = list(requests), {}
        while waiting or running:
            while waiting and len(running) < work["concurrency"]:
                asked = waiting.pop(0)
                params = genai.GeneratorParams(model)
                total = len(asked["prompt"]) + asked["new_tokens"]
                params.set_search_options(do_sample=False, max_length=total, min_length=total)
                request = genai.Request(params)
                request.add_tokens(np.array(asked["prompt"], np.int32))
                running[id(request)] = [request, 0, time.perf_counter()]
                engine.add_request(request)
            ready = engine.step()
            if ready is None:
                continue
            state = running[next(key for key, value in running.items() if value[0] == ready or key == id(ready))]
            while ready.has_unseen_tokens():
                ready.get_unseen_token()
                if not state[1]:
                    first.append(time.perf_counter() - state[2])
                state[1] += 1
            if ready.is_done():
                engine.remove_request(ready)
                running = {key: value for key, value in running.items() if value is not state}

    requests = work["requests"]
    serve = serve_one_by_one if work["concurrency"] == 1 else serve_together
    serve([{**requests[0], "new_tokens": 8}])
    first.clear()
    start = time.perf_counter()
    serve(requests)
    seconds = time.perf_counter() - start
    tokens = sum(r["new_tokens"] for r in requests)
    print(json.dumps({"tokens_per_s": tokens / seconds, "first_token_ms": float(np.median(first)) * 1000}))


main()
