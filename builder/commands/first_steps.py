"""Print the next steps for `build-repo` without arguments, in ten lines."""

from __future__ import annotations

from rich.markup import escape

from builder.commands import DEFAULT_REPOSITORY, output
from builder.common.distribution import own_version

EXAMPLE = "all-MiniLM-L6-v2"


def print_first_steps() -> None:
    """Print the steps, with a model of the repository in this folder where it has one."""
    built = sorted(path.parent.name for path in DEFAULT_REPOSITORY.glob("*/build.json"))
    has = f"{len(built)} of them in {DEFAULT_REPOSITORY}" if built else "nothing is built here so far"
    steps = {
        "doctor": "what this machine can build and serve",
        f"sentence-transformers/{EXAMPLE}": "build a model: a Hub id, a folder or a models.yaml",
        "check": f"find mistakes in models; {has}",
        "serve": "a real Triton on them, without Docker",
        f'query {built[0] if built else EXAMPLE} text_input="Hello"': "ask one, from another terminal",
        "load-test NAME": "measure it",
        "help": "all verbs; build-repo help VERB prints its options",
    }
    output.print(f"[bold]build-repo {own_version()}[/] makes Triton model repositories of Hugging Face checkpoints")
    output.print()
    width = max(map(len, steps))
    for command, meaning in steps.items():
        output.print(f"  build-repo {escape(command):<{width}}  {meaning}", soft_wrap=True)
