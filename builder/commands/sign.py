"""`build-repo sign`: sign the models of a repository with the user's own key."""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.commands import REPOSITORY, screen
from builder.common.errors import SpecError
from builder.repository.signatures import sign
from builder.repository.signing_keys import Signer
from builder.repository.transaction import recover


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo sign",
        description="Sign models, each with its engine: model.sig in each folder, in the format of OpenSSF's "
        "model-signing. Needs the extra sign, and no network.",
    )
    add = arguments.add_argument
    add("name", nargs="*", help="a model of the repository (default: all)")
    add("--repository", **REPOSITORY)
    add("--key", type=Path, required=True, metavar="FILE", help="private key (PEM, P-256, P-384 or P-521)")
    add("--certificate", type=Path, metavar="FILE", help="its certificate (PEM), to sign with that")
    add(
        "--chain",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a certificate between that one and the one that is trusted; may be repeated",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    if options.chain and options.certificate is None:
        raise SpecError("--chain goes with --certificate; give both")
    recover(options.repository)
    signer = Signer(options.key, options.certificate, tuple(options.chain))
    for name in sign(options.repository, signer, options.name):
        screen.print(f"[green]✓[/] {name}: signed")
    return 0
