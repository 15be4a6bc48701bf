"""The command line: `build-repo MODEL`, and verbs. Anything that is not a verb is a model or a models.yaml.

build-repo MODEL [options]        build and publish one model
build-repo models.yaml            build many, declared in a file
build-repo serve [DIR]            a real Triton on a repository
build-repo query NAME key=value   ask a served model
build-repo gateway                the APIs of OpenAI, Cohere and TEI in front of a server
build-repo load-test NAME         perf_analyzer on a served model
build-repo evaluate NAME          quality on labelled data, beside PyTorch's
build-repo plan models.yaml       what a load needs of a machine, with the arithmetic
build-repo tune NAME              settings that need no build, by load tests
build-repo check [DIR]            lint a repository without a server
build-repo sign [NAME]            sign models with a key of your own
build-repo verify [DIR]           are all models the ones that were signed?
build-repo compile [DIR]          TensorRT plans, on the GPU that is to serve them
build-repo report NAME            what a build measured, as a table and as an HTML page
build-repo card NAME              a model card: quality, speed, licence and provenance
build-repo versions NAME          the versions of a model
build-repo promote NAME           try the newest version on a running server, then let it answer
build-repo rollback NAME          serve the version before
build-repo adapter NAME           the LoRA adapters of a model: add, remove, show
build-repo remove NAME            take a model out of the repository
build-repo share MODELS --name N  one front, in one process, for many encoders
build-repo unshare MODELS --name N  give encoders of a shared front their own fronts again
build-repo cache [prune]          what builds keep between runs, and how it is made smaller
build-repo push NAME --to URL     a version of a model to an object store or an OCI registry
build-repo pull NAME --from URL   a version of a model from an object store or an OCI registry
build-repo store check URL        the files of an object store, compared with their hashes
build-repo deploy --to kubernetes  a repository as the manifests of an orchestrator
build-repo doctor                 what this machine can build and serve, and what to mend
build-repo completion bash        a script that completes verbs and options in a shell
build-repo help [VERB]            this text, or the options of a verb
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from rich.markup import escape

from builder.commands import VERBS, output, screen
from builder.commands.first_steps import print_first_steps
from builder.common.distribution import own_version
from builder.common.errors import BuilderError, SpecError

HELP = "help"
CLOSE = 0.75  # least similarity of a word that counts as a misspelt verb; "serv" and "serve" have 0.89


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for an error the user can fix, 130 for an interrupt.

    Without `arguments` it is the program, with its own, and may end the process itself.
    """
    if arguments is not None:
        return _run(arguments)
    status = _run(sys.argv[1:])
    if "torch" in sys.modules:
        _exit_at_once(status)
    return status


def _exit_at_once(status: int) -> None:
    """End this process as Python does, but without unloading its modules one by one.

    For torch and transformers that takes more than a second. If the output can no longer be written, Python reports it.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons, and ends pools
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(arguments: Sequence[str]) -> int:
    if not arguments and output.is_terminal:
        print_first_steps()
        return 0
    try:
        command, options = parse(arguments)
        for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell starts background jobs with it ignored
            signal.signal(number, signal.default_int_handler)
        return int(command.run(options))
    except BuilderError as error:
        screen.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        screen.print("interrupted")
        return 130


def parse(arguments: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """Return the module of the verb that `arguments` name, and its options.

    Raises SpecError for a misspelt verb, SystemExit for options that the verb does not have.
    """
    arguments = list(arguments)
    if arguments[:1] == [HELP]:
        arguments = [*arguments[1:], "--help"]
    verb = arguments.pop(0) if arguments and arguments[0] in VERBS else None
    if verb is None and arguments and not arguments[0].startswith("-"):
        _refuse_misspelt_verb(arguments[0])
    command = importlib.import_module(f"builder.commands.{(verb or 'build').replace('-', '_')}")
    parser: argparse.ArgumentParser = command.parser()
    if verb is None:
        parser.description = __doc__
        parser.add_argument("--version", action="version", version=f"build-repo {own_version()}")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest_options(parser, unknown)}")
    return command, options


def _nearest_options(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return the end of a sentence that names `unknown` arguments: the options that they look like."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    words = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
    near = [match for word in words for match in difflib.get_close_matches(word, known, n=1)]
    return f"; did you mean {' and '.join(near)}?" if near else ""


def _refuse_misspelt_verb(word: str) -> None:
    """Raise SpecError if `word` looks like a verb; it is a model if a folder here is called that."""
    near = difflib.get_close_matches(word, (*VERBS, HELP), n=1, cutoff=CLOSE)
    if near and not Path(word).exists():
        raise SpecError(
            f"{word!r} is neither a verb nor a folder here; did you mean build-repo {near[0]}? "
            f"For a model of that name on the Hub, give its organisation too: build-repo ORGANISATION/{word}"
        )
