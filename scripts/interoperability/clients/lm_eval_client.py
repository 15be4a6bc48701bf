"""lm-evaluation-harness on a task file: local-completions with token ids and with texts, local-chat-completions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import WORK, check, report

QUESTIONS = [
    {"question": "The museum opens on", "choices": ["Friday", "Sunday"], "answer": 0},
    {"question": "The soup needs", "choices": ["salt", "a passport"], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{rest}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list: [{metric: acc}]'
SAID = (
    'doc_to_target: "{{choices[answer]}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}\n'
    "metric_list: [{metric: exact_match}]"
)
READ = 'doc_to_target: "{{question}}"\nmetric_list: [{metric: bits_per_byte}]'
KINDS = (
    ("picks", "multiple_choice", CHOICES),
    ("says", "generate_until", SAID),
    ("reads", "loglikelihood_rolling", READ),
)


def evaluate(model: str, task: str, path: str, *more: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = folder / "questions.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        for name, kind, rest in KINDS:
            (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, rest=rest))
        arguments = [f"base_url={WORK['gateway']}{path}", "model=writes", "num_concurrent=2", "max_retries=1", *more]
        command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", ",".join(arguments)]
        command += ["--tasks", task, "--include_path", str(folder), "--output_path", str(folder / "results")]
        command += ["--apply_chat_template"] if "chat" in model else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        (results,) = (folder / "results").rglob("results*.json")
        assert task in json.loads(results.read_text())["results"]


TOKENIZER = f"tokenizer={WORK['tokenizer']}"


@check("local-completions, log-likelihoods of token ids")
def _() -> None:
    evaluate("local-completions", "picks", "/v1/completions", TOKENIZER, "tokenizer_backend=huggingface")


@check("local-completions, log-likelihoods of texts")
def _() -> None:
    more = (TOKENIZER, "tokenizer_backend=huggingface", "tokenized_requests=False")
    evaluate("local-completions", "picks", "/v1/completions", *more)


@check("local-completions, perplexity")
def _() -> None:
    evaluate("local-completions", "reads", "/v1/completions", TOKENIZER, "tokenizer_backend=huggingface")


@check("local-completions, generation")
def _() -> None:
    evaluate("local-completions", "says", "/v1/completions", TOKENIZER, "tokenizer_backend=huggingface")


@check("local-chat-completions, generation")
def _() -> None:
    evaluate("local-chat-completions", "says", "/v1/chat/completions")


report()
