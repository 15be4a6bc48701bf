"""Minutes of mixed traffic on a generating model: streams, whole answers, cancellations, disconnects, bad requests.

Prompts of 1 to 60 words, answers of 2 to 90 tokens, beams and log-probabilities among them. With `--kills`, `--floods`
and `--publishes` its process is killed, it is flooded, and its versions change meanwhile. Every complete answer
must equal the answer to its prompt alone, no slot may be lost, and memory must stay flat.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.common.errors import ServeError
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.serving.client.client import Client
from builder.serving.server.triton import TritonServer, running
from scripts.benchmarks.circumstances import circumstances, report_figures
from scripts.benchmarks.disturbances import AT_ONCE, RECOVERY_S, Disturbances, watched
from scripts.benchmarks.held import held
from tests.decoders import make_decoder_checkpoint

PROMPTS = 48
EXTRAS: tuple[dict[str, int], ...] = ({}, {}, {"logprobs": 3}, {}, {"num_beams": 3}, {}, {})
BAD = (
    {"text_input": ""},
    {"text_input": "x", "temperature": -1.0},
    {"text_input": "x", "max_tokens": 10**6},
    {"messages": "{"},
    {"text_input": "word " * 400},
    {"text_input": "word " * 40_000},
)
LAST_LINES = 60  # of the log of a Triton that ended
TIMEOUT_S = 20.0  # of a request: Triton reports nothing about streams in a process that was killed


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench soak")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--precision", default="fp32")
    for kind, says in (
        ("kills", "of the model's process"),
        ("floods", f"of {AT_ONCE} requests at once"),
        ("publishes", "of a new version"),
    ):
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="N", help=f"so many {says} (default 0)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_decoder_checkpoint(Path(scratch) / "checkpoint", "llama", chat=True)
        quality = {"quality": 0.0, "perplexity": 1e9} if options.precision != "fp32" else {}
        spec = make_spec(
            model=str(folder),
            name="model",
            output=Path(scratch) / "repository",
            slots=6,
            precision=options.precision,
            serving={"prefill_tokens": 32},
            **quality,
        )
        build(spec)
        with running(spec.output) as server:
            kinds = {"kill": options.kills, "flood": options.floods, "publish": options.publishes}
            report = {**circumstances(), **_soak(server, options.minutes, options.clients, kinds)}
    report_figures(options.output, report)
    assert not report["wrong"], report["wrong"]
    assert report["running_at_the_end"] == report["waiting_at_the_end"] == 0, "a slot was lost"


def _soak(server: TritonServer, minutes: float, clients: int, kinds: Mapping[str, int]) -> dict[str, object]:
    generator = np.random.default_rng(0)
    with Client(server.url, "model") as client:
        samples, alone = [], []
        for index in range(PROMPTS):
            words = TEXTS[index % len(TEXTS)].split()
            prompt = " ".join(words[: int(generator.integers(1, 60 if index % 4 == 0 else 14))])
            sample = {"text_input": prompt, "max_tokens": int(generator.integers(2, 90)), "ignore_eos": True}
            samples.append({**sample, **EXTRAS[index % len(EXTRAS)]})
            alone.append("".join(client.ask(samples[-1])["text_output"]))
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    ended = threading.Event()
    watcher = watched(server, ended)
    disturbed = Disturbances(server, "model", samples, alone, wrong)
    end = time.monotonic() + 60 * minutes
    threads = [
        threading.Thread(
            target=_client, args=(server.url, seed, end, samples, alone, counts, wrong, disturbed), daemon=True
        )
        for seed in range(clients)
    ]
    threads.append(threading.Thread(target=disturbed.run, args=(60 * minutes - RECOVERY_S / 2, kinds), daemon=True))
    for thread in threads:
        thread.start()
    memory = []
    while any(thread.is_alive() for thread in threads):
        memory.append(held(server))
        time.sleep(5)
        if (status := server.process.poll()) is not None:
            print(*server.log[-LAST_LINES:], sep="\n", flush=True)
            raise SystemExit(f"Triton ended: {status}; above are the last lines of its log")
    time.sleep(3)
    ended.set()
    metrics = _metrics(server)
    settled = memory[len(memory) // 5 :] or memory
    minutely = memory[::12]
    return {
        "minutes": minutes,
        "clients": clients,
        **dict(counts),
        "wrong": wrong[:5],
        "tokens": metrics["generated_tokens_total"],
        "reused_prompt_tokens": metrics["reused_tokens_total"],
        "running_at_the_end": metrics["running"],
        "waiting_at_the_end": metrics["waiting"],
        "megabytes_after_a_fifth": round(settled[0].resident, 1),
        "megabytes_at_the_end": round(settled[-1].resident, 1),
        "megabytes_of_triton_by_minute": [round(now.triton, 1) for now in minutely],
        "megabytes_of_each_process_by_minute": [[round(size, 1) for size in now.processes] for now in minutely],
        "megabytes_of_shared_memory_by_minute": [round(now.shared, 1) for now in minutely],
        **disturbed.counts,
        "processes_at_the_end": len(disturbed.processes()),
        "loaded_again": watcher.reloads.get("model", 0),
        "back_after_s": [round(seconds, 1) for seconds in disturbed.recovered_s],
    }


def _client(
    url: str,
    seed: int,
    end: float,
    samples: list[dict],
    alone: list[str],
    counts: Counter[str],
    wrong: list[str],
    disturbed: Disturbances,
) -> None:
    chance = random.Random(seed)
    with Client(url, "model", TIMEOUT_S) as client:
        while time.monotonic() < end:
            index = chance.randrange(len(samples))
            kind = chance.choices(("streamed", "whole", "left", "bad"), (60, 15, 20, 5))[0]
            started = time.monotonic()
            try:
                if kind == "bad":
                    client.ask(chance.choice(BAD))
                    wrong.append("a bad request was answered")
                elif kind == "whole":
                    _compare("".join(client.ask(samples[index])["text_output"]), alone[index], wrong)
                else:
                    text, pieces = "", 0
                    answers = client.stream({**samples[index], "stream": True})
                    for answer in answers:
                        text, pieces = text + "".join(answer["text_output"]), pieces + 1
                        if kind == "left" and chance.random() < 0.3:
                            break
                    answers.close()  # type: ignore[attr-defined]
                    _compare(text, alone[index][: len(text)] if kind == "left" else alone[index], wrong)
            except ServeError as error:
                if kind != "bad" and disturbed.explains(started, time.monotonic()):
                    kind = "cut_by_a_kill_or_a_flood"
                elif kind != "bad":
                    wrong.append(str(error))
            counts[kind] += 1


def _compare(text: str, expected: str, wrong: list[str]) -> None:
    if text != expected:
        wrong.append(f"{text!r} instead of {expected!r}")


def _metrics(server: TritonServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {name: float(value) for name, value in re.findall(r"^build_repo_(\w+){.*} ([\d.e+-]+)$", text, re.MULTILINE)}


if __name__ == "__main__":
    main()
