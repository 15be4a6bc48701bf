"""The command line: `build-repo MODEL`, and verbs. Anything that is not a verb is a model or a models.yaml.

build-repo MODEL [options]        build and publish one model
build-repo models.yaml            build many, declared in a file
build-repo serve [DIR]            a real Triton on a repository
build-repo query NAME key=value   ask a served model
build-repo load-test NAME         perf_analyzer on a served model
build-repo check [DIR]            lint a repository without a server
build-repo compile [DIR]          TensorRT plans, on the GPU that is to serve them
build-repo report NAME            what a build measured, as a table and as an HTML page
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

from rich.markup import escape

from builder.commands import screen
from builder.errors import BuilderError

VERBS = ("serve", "query", "load-test", "check", "compile", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for an error the user can mend, 130 for an interrupt."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    verb = arguments.pop(0) if arguments and arguments[0] in VERBS else "build"
    command = importlib.import_module(f"builder.commands.{verb.replace('-', '_')}")
    parser = command.parser()
    if verb == "build":
        parser.description = __doc__
    options = parser.parse_intermixed_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background job is started with it ignored
        signal.signal(number, _interrupt)
    try:
        return int(command.run(options))
    except BuilderError as error:
        screen.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        screen.print("interrupted")
        return 130


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
