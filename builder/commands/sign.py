"""`build-repo sign`: sign the models of a repository with the user's own key."""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.commands import DEFAULT_REPOSITORY, REPOSITORY_HELP, screen
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
    arguments.add_argument("name", nargs="*", help="a model of the repository (default: all)")
    arguments.add_argument("--repository", type=Path, default=DEFAULT_REPOSITORY, help=REPOSITORY_HELP)
    arguments.add_argument(
        "--key", type=Path, required=True, metavar="FILE", help="private key (PEM, P-256, P-384 or P-521)"
    )
    arguments.add_argument("--certificate", type=Path, metavar="FILE", help="its certificate (PEM), to sign with that")
    arguments.add_argument(
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
        screen.print(f"[green]✓[/] {name}: signed", highlight=False)
    return 0
