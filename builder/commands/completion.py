"""`build-repo completion`: a script that completes verbs, options and files in a shell."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import shtab

from builder.commands import VERBS, build

SHELLS = ("bash", "zsh")


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo completion",
        description="Print a script that completes the verbs, options and files of build-repo. bash reads it from "
        "~/.local/share/bash-completion/completions/build-repo, zsh as _build-repo in a folder of fpath.",
    )
    arguments.add_argument("shell", choices=SHELLS, help="whose script")
    return arguments


def run(options: argparse.Namespace) -> int:
    print(shtab.complete(whole_parser(), options.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with the options of a build and every verb, which marks the options that take files.

    The command line itself loads the parser of one verb only.
    """
    whole = argparse.ArgumentParser(prog="build-repo", add_help=False)
    for action in build.parser()._actions:
        if action.option_strings:
            whole._add_action(action)
    verbs = whole.add_subparsers(dest="verb")
    for verb in VERBS:
        command: argparse.ArgumentParser = importlib.import_module(
            f"builder.commands.{verb.replace('-', '_')}"
        ).parser()
        verbs.add_parser(verb, parents=[command], add_help=False, help=(command.description or "").partition(". ")[0])
        for action in command._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab reads
    return whole
