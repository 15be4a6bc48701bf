"""Text generation on a real Triton: over gRPC streams and HTTP, against transformers' own text."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from builder.common.errors import ServeError
from builder.serving.client.client import Client
from builder.serving.load.measure import load_test
from builder.serving.load.perf_analyzer import find_perf_analyzer
from builder.serving.load.traffic import Target, concurrencies
from builder.serving.server.triton import TritonServer, running
from tests.served.counts import counts
from tests.served.statistics import TRIES

Connect = Callable[[str], Client]
PROMPTS = ("The museum in Oslo", "My order arrived", "Water expands when it freezes, which is why", "A")


def reference(folder: Path, prompt: str, count: int, special: bool = True) -> str:
    """Return the text that transformers adds to the prompt, greedily and past any end."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=special)["input_ids"]
    with torch.no_grad():
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    whole = tokenizer.decode(result[0], skip_special_tokens=True)
    return whole[len(tokenizer.decode(ids[0], skip_special_tokens=True)) :]


def text(answer: dict[str, Any]) -> str:
    return "".join(answer["text_output"])


def streamed(client: Client, **sample: Any) -> tuple[str, list[dict[str, Any]]]:
    answers = list(client.stream({"stream": True, **sample}))
    return "".join(text(answer) for answer in answers), answers


@pytest.mark.parametrize("name", ["writes", "writes_bls", "writes_one", "writes_openvino", "writes_states"])
def test_greedy_text_equals_transformers_streamed_and_whole(
    name: str, client: Connect, checkpoint: Callable[[str], Path]
) -> None:
    connection = client(name)
    for prompt in PROMPTS:
        expected = reference(checkpoint(name), prompt, 24)
        sample = {"text_input": prompt, "max_tokens": 24, "ignore_eos": True}
        whole = connection.ask(sample)
        assert text(whole) == expected
        assert whole["finish_reason"] == ["length"]
        assert whole["completion_tokens"] == [24]
        streamed_text, answers = streamed(connection, **sample)
        assert streamed_text == expected
        assert len(answers) > 3
        assert [answer.get("finish_reason") for answer in answers].count(["length"]) == 1
        assert all("\ufffd" not in text(answer) or "\ufffd" in expected for answer in answers)


def test_concurrent_requests_get_the_same_text_as_alone(client: Connect) -> None:
    """24 streams of unequal length over 4 slots."""
    connection = client("writes_int8")
    samples = [
        {"text_input": PROMPTS[i % 4] + " and" * (i % 5), "max_tokens": 5 + 7 * (i % 6), "ignore_eos": True}
        for i in range(24)
    ]
    alone = [text(connection.ask(sample)) for sample in samples]
    texts: dict[int, str] = {}

    def ask(index: int) -> None:
        with Client(connection.url, "writes_int8") as own:
            texts[index] = streamed(own, **samples[index])[0]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(samples))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[index] for index in range(len(samples))] == alone


def test_chat_messages_are_rendered_with_the_chat_template(client: Connect, checkpoint: Callable[[str], Path]) -> None:
    messages = [{"role": "user", "content": "Where is the museum?"}]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("writes"))
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = client("writes").ask({"messages": json.dumps(messages), "max_tokens": 12, "ignore_eos": True})
    assert text(answer) == reference(checkpoint("writes"), prompt, 12, special=False)
    echoed = client("writes").ask({"messages": json.dumps(messages), "max_tokens": 2, "echo": True})
    assert text(echoed).startswith(prompt)


@pytest.mark.parametrize("name", ["writes", "writes_bls", "writes_states"])
def test_prompt_log_probabilities_equal_transformers(
    name: str, client: Connect, checkpoint: Callable[[str], Path]
) -> None:
    prompt = PROMPTS[2]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(name))
    model = AutoModelForCausalLM.from_pretrained(checkpoint(name))
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        known = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), dim=-1).gather(1, ids[0, 1:, None])
    answer = client(name).ask({"text_input": prompt, "max_tokens": 1, "prompt_logprobs": 0})
    logprobs = json.loads(answer["prompt_logprobs_output"])
    assert [entry["token"] for entry in logprobs] == ids[0].tolist()
    assert logprobs[0]["logprob"] is None
    assert [entry["logprob"] for entry in logprobs[1:]] == pytest.approx(known[:, 0].tolist(), abs=1e-3)


def test_guided_answer_is_valid_and_invalid_guide_fails_its_request(client: Connect) -> None:
    connection = client("writes")
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["museum", "river"]},
            "rooms": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["kind", "rooms"],
        "additionalProperties": False,
    }
    sample = {"text_input": PROMPTS[0], "max_tokens": 60}
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "random_seed": 3}):
        answer = connection.ask({**sample, **options, "guide": json.dumps({"json_schema": schema})})
        document = json.loads(text(answer))
        assert answer["finish_reason"] == ["stop"]
        assert document["kind"] in ("museum", "river")
        assert 0 <= document["rooms"] <= 99
    (code,) = connection.ask({**sample, "guide": json.dumps({"regex": "[0-9]{3}-[a-z]{2}"})})["text_output"]
    assert len(code) == 6
    with pytest.raises(ServeError, match="unclosed group"):
        connection.ask({**sample, "guide": json.dumps({"regex": "(a"})})


def test_seed_reproduces_several_sequences(client: Connect) -> None:
    connection = client("writes")
    sample = {"text_input": "The committee", "max_tokens": 16, "temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
    first = connection.ask({**sample, "random_seed": 5, "n": 3})
    again = connection.ask({**sample, "random_seed": 5, "n": 3})
    other = connection.ask({**sample, "random_seed": 6, "n": 3})
    assert first == again
    assert first["text_output"] != other["text_output"]
    assert len(set(first["text_output"])) == 3
    pieces: dict[int, str] = {0: "", 1: "", 2: ""}
    for answer in connection.stream({**sample, "random_seed": 5, "n": 3, "stream": True}):
        pieces[answer.get("index", [0])[0]] += text(answer)
    assert list(pieces.values()) == first["text_output"]


def test_stop_words_end_the_text_and_log_probabilities_match(client: Connect) -> None:
    connection = client("writes")
    sample = {"text_input": "The film starts", "max_tokens": 20, "ignore_eos": True}
    whole = text(connection.ask(sample))
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    streamed_text, answers = streamed(connection, **sample, stop_words=[stop])
    assert streamed_text == whole[: whole.find(stop)]
    assert answers[-1]["finish_reason"] == ["stop"]
    answer = connection.ask({**sample, "logprobs": 2})
    tokens = json.loads(answer["logprobs_output"][0])
    assert len(tokens) == answer["completion_tokens"][0] == 20
    assert all(entry["logprob"] == entry["top"][0]["logprob"] <= 0 for entry in tokens), "greedy takes the best"


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text_input": "word " * 300}, "the prompt has [0-9]+ tokens; this model takes 1 to 127"),
        ({"text_input": "Hello", "max_tokens": 5000}, "max_tokens is 5000; after a prompt of [0-9]+ tokens it can be"),
        ({"text_input": "Hello", "max_tokens": 0}, "max_tokens is 0"),
        ({"text_input": "Hello", "temperature": -2}, "temperature is -2.0; expected 0 to 100"),
        ({"text_input": "Hello", "stop_token_ids": [999999]}, "999999 is not a token id; this model has 0 to"),
        ({"text_input": ""}, "text_input is missing or empty"),
        ({"messages": "nonsense"}, "messages is not JSON"),
        ({"messages": '[{"role": "wizard", "content": "x"}]'}, "unknown role wizard"),
        ({"text_input": "Hello", "timeout_ms": 1, "max_tokens": 100, "n": 16}, "the request's time was over"),
    ],
)
def test_invalid_request_is_refused_and_the_next_one_answered(
    sample: dict[str, Any], message: str, client: Connect
) -> None:
    connection = client("writes")
    with pytest.raises(ServeError, match=message):
        connection.ask(sample)
    assert connection.ask({"text_input": "Hello", "max_tokens": 3})["finish_reason"]


def test_messages_without_a_chat_template_are_refused(client: Connect) -> None:
    with pytest.raises(ServeError, match="no chat template"):
        client("writes_int8").ask({"messages": '[{"role": "user", "content": "x"}]'})


def test_disconnected_client_frees_its_slot(client: Connect) -> None:
    """The only slot answers the next request although the one before asked for far more tokens."""
    connection = client("writes_one")
    long = {"text_input": "The", "max_tokens": 250, "ignore_eos": True, "stream": True}
    for _ in range(3):
        answers = connection.stream(long)
        assert isinstance(answers, Generator)
        next(answers)
        answers.close()
    assert connection.ask({"text_input": "The", "max_tokens": 3})["finish_reason"]


def test_full_queue_refuses_requests(client: Connect) -> None:
    """A model with one slot and a queue of two refuses some of 12 concurrent requests.

    Every other request is answered.
    """
    url = client("writes_one").url

    def ask(_: int) -> str:
        with Client(url, "writes_one") as own:
            try:
                own.ask({"text_input": "The", "max_tokens": 200, "ignore_eos": True})
            except ServeError as error:
                return "refused" if "sequences wait already" in str(error) else str(error)
        return "answered"

    def outcomes() -> set[str]:
        with ThreadPoolExecutor(12) as pool:
            seen = set(pool.map(ask, range(12)))
        assert seen <= {"answered", "refused"}
        return seen

    assert any(outcomes() == {"answered", "refused"} for _ in range(TRIES))


def _post(server: TritonServer, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"http://{server.host}:{server.ports.http}/v2/models/{path}", json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        content: str = response.read().decode()
    return content


def test_generate_and_generate_stream_over_http(server: TritonServer, client: Connect) -> None:
    body = {"text_input": "The museum", "max_tokens": 12, "ignore_eos": True}
    expected = text(client("writes").ask(body))
    assert json.loads(_post(server, "writes/generate", {**body, "id": "42"}))["text_output"] == expected
    events = _post(server, "writes/generate_stream", {**body, "stream": True})
    pieces = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: ")]
    assert "".join(piece["text_output"] for piece in pieces) == expected
    with pytest.raises(urllib.error.HTTPError) as refused:
        _post(server, "writes/generate", {**body, "best_of": 2})
    assert "'best_of' is not an option of this model" in refused.value.read().decode()


def test_metrics_count_requests_and_tokens(server: TritonServer, client: Connect) -> None:
    before = counts(server, "writes")
    prompt = "The court in Nairobi ruled on Tuesday that the ministry must publish the contracts"
    for _ in range(2):
        client("writes").ask({"text_input": prompt, "max_tokens": 9, "ignore_eos": True})

    def grown() -> bool:
        """Return True if all counters grew; they are published one by one."""
        after = counts(server, "writes")
        return (
            after["generated_tokens_total"] >= before["generated_tokens_total"] + 18
            and after["requests_total"] >= before["requests_total"] + 2
            and after["reused_tokens_total"] > before["reused_tokens_total"]  # the second prompt was cached
            and after["first_token_seconds_total"] > before["first_token_seconds_total"]
        )

    deadline = time.monotonic() + 300
    while not grown() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert grown()
    assert counts(server, "writes")["slots"] == 4


def test_failed_decode_loop_reports_its_error_to_every_request(repository: Path, tmp_path: Path) -> None:
    """The first step fails because the graph contradicts serving.json; the server stays up."""
    shutil.copytree(repository / "writes", tmp_path / "repository" / "writes")
    path = tmp_path / "repository" / "writes" / "1" / "serving.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "vocabulary": document["vocabulary"] - 1}))
    with running(tmp_path / "repository") as server, Client(server.url, "writes") as connection:
        with pytest.raises(ServeError, match="the decode loop failed: "):
            connection.ask({"text_input": "Hello", "max_tokens": 3})
        with pytest.raises(ServeError, match=r"the decode loop failed earlier: .*; reload the model"):
            connection.ask({"text_input": "Hello", "max_tokens": 3})
        deadline = time.monotonic() + 300
        while counts(server, "writes")["healthy"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert counts(server, "writes")["healthy"] == 0


def test_perf_analyzer_drives_a_stream(server: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the real program, but let its first run break off with an empty export, as 2.51 occasionally does."""
    program, environment = find_perf_analyzer()
    breaks_off = tmp_path / "perf_analyzer"
    breaks_off.write_text(
        f"""#!/bin/sh
[ -e {tmp_path}/began ] && exec {program} "$@"
touch {tmp_path}/began
while [ $# -gt 0 ]; do case $1 in -f) touch "$2";; --profile-export-file) touch "$2";; esac; shift; done
exit 139
"""
    )
    breaks_off.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", environment.get("LD_LIBRARY_PATH", ""))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sample = {"text_input": "The museum in Oslo", "max_tokens": 8, "ignore_eos": True}
    target = Target("writes", [{**sample, "stream": True}])
    shown: list[tuple[int, int]] = []
    levels = concurrencies("2")
    run = load_test(server.url, [target], levels, repeats=1, seconds=1.5, on_progress=lambda *n: shown.append(n))
    assert shown == [(1, 1)], "the repeated attempt counts once"
    assert (tmp_path / "began").exists()
    (load,) = run.loads
    assert load.client.requests_per_s > 0
    assert load.server.failures == 0
    stream = load.client.stream
    assert stream is not None
    assert stream.tokens_per_s == pytest.approx(8 * load.client.requests_per_s)
    assert 0 < stream.first_p50_ms < load.client.p50_ms
    assert 0 < stream.between_p50_ms <= stream.between_p99_ms


def test_query_prints_text_on_a_terminal_as_it_arrives(server: TritonServer, client: Connect) -> None:
    expected = text(client("writes").ask({"text_input": "The film", "max_tokens": 8, "ignore_eos": True}))
    ours, theirs = pty.openpty()
    program = "import sys; from builder.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "query", "writes", "--url", server.url]
    command += ["text_input=The film", "max_tokens=8", "ignore_eos=true"]
    subprocess.run(command, stdout=theirs, check=True, timeout=300)
    shown = os.read(ours, 10_000).decode().replace("\r\n", "\n")
    os.close(theirs)
    os.close(ours)
    assert shown == f"{expected}\n[length; 8 tokens]\n"
