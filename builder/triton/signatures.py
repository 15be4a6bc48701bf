"""Signatures of models: by whom each was published, and that nothing in it was changed since.

One for each folder of a repository, in the format of OpenSSF's model-signing (a Sigstore bundle; no network is asked):
a new version of one model leaves the signatures of all others as they are. Knows files and keys; knows no model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.errors import RepositoryError, SpecError

SIGNATURE = "model.sig"  # model-signing's own name for it


@dataclass(frozen=True)
class Signer:
    """`key`: a private key (PEM; an elliptic curve's). `certificate`: its certificate, and `chain` those between it and
    the one that is trusted; None where the key itself is trusted.
    """

    key: Path
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()


def sign(repository: Path, signer: Signer, names: Sequence[str] = ()) -> list[str]:
    """Sign the models `names` with their engines, or all. Returns the folders that were signed.

    Raises SpecError for a key that cannot be used, RepositoryError for a model that is not there or has links in it.
    """
    folders = _folders(repository)
    wanted = [entry for name in names for entry in _with_engine(repository, name)] or list(folders)
    configuration = _signing(signer)
    for name in wanted:
        unfinished = folders[name].parent / f".{name}.{SIGNATURE}"
        try:
            configuration.sign(folders[name], unfinished)
        except (OSError, ValueError) as error:
            raise RepositoryError(f"{name} cannot be signed: {error}") from error
        os.replace(unfinished, folders[name] / SIGNATURE)
    return wanted


def unsigned(repository: Path, trusted: Path) -> list[str]:
    """What keeps each model from being the one that was signed, in a sentence with its name; nothing where all hold.

    `trusted`: a public key, or the certificates (PEM) that a signer's own must lead to. Raises SpecError where it is
    neither.
    """
    configuration = _verifying(trusted)
    folders = _folders(repository)
    return [
        f"{name}: {found}" for name, folder in folders.items() for found in _problems(folder, configuration, trusted)
    ]


def _problems(folder: Path, configuration: Any, trusted: Path) -> Iterator[str]:
    if not (folder / SIGNATURE).is_file():
        yield f"it is not signed (no {SIGNATURE}); whoever published it can: build-repo sign"
        return
    try:
        configuration.verify(folder, folder / SIGNATURE)
    except ValueError as error:
        if str(error).startswith("Signature mismatch"):  # the signature itself holds
            yield from _changes(folder)
        else:
            yield _not_held(error, trusted)
        return
    except Exception as error:  # whatever a damaged signature makes the libraries raise
        yield _not_held(error, trusted)
        return
    signed_as = _statement(folder)["subject"][0]["name"]
    if signed_as != folder.name:
        yield f"it was signed as {signed_as}, another model; give it its name back"


def _not_held(error: Exception, trusted: Path) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"its signature does not hold: {reason}; expected one by {trusted.name}"


def _changes(folder: Path) -> Iterator[str]:
    """What is no longer as its good signature says, each by its name."""
    signed = {item["name"]: item["digest"] for item in _statement(folder)["predicate"]["resources"]}
    here = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    del here[SIGNATURE]
    yield from (f"{name} was added after it was signed" for name in here if name not in signed)
    yield from (f"{name} was removed after it was signed" for name in signed if name not in here)
    for name in signed:
        if name in here and _sha256(here[name]) != signed[name]:
            yield f"{name} was changed after it was signed"


def _statement(folder: Path) -> Any:
    """What a signature that holds says: an in-toto statement."""
    bundle = json.loads((folder / SIGNATURE).read_text("utf-8"))
    return json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))


def _folders(repository: Path) -> dict[str, Path]:
    """What Triton takes for a model: every folder. Raises RepositoryError where there is none."""
    found = {path.name: path for path in sorted(repository.iterdir()) if path.is_dir()} if repository.is_dir() else {}
    if not found:
        raise RepositoryError(f"{repository} holds no model; build one first: build-repo MODEL --output {repository}")
    return found


def _with_engine(repository: Path, name: str) -> list[str]:
    """The folders of a model: its own, and those of its build. Raises RepositoryError where it is not there."""
    if not (repository / name).is_dir() or Path(name).name != name:
        raise RepositoryError(f"{repository} has no model {name}; it has {', '.join(_folders(repository))}")
    try:
        built = json.loads((repository / name / "build.json").read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        built = ()
    return [name, *(other for other in built if other != name and (repository / other).is_dir())]


def _signing(signer: Signer) -> Any:
    package = _package()
    configuration = package.signing.Config().set_hashing_config(_all_files(package))
    try:
        if signer.certificate is None:
            return configuration.use_elliptic_key_signer(private_key=signer.key)
        return configuration.use_certificate_signer(
            private_key=signer.key,
            signing_certificate=signer.certificate,
            certificate_chain=signer.chain or (signer.certificate,),  # model-signing takes no empty chain
        )
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(
            f"{signer.key} cannot sign: {_first_line(error)}. Expected a private key of the curve P-256, P-384 or "
            "P-521 as PEM without a password, and with --certificate the one that belongs to it"
        ) from error


def _verifying(trusted: Path) -> Any:
    package = _package()
    configuration = package.verifying.Config().set_hashing_config(_all_files(package))
    try:
        if b"BEGIN CERTIFICATE" in trusted.read_bytes():
            return configuration.use_certificate_verifier(certificate_chain=[trusted])
        return configuration.use_elliptic_key_verifier(public_key=trusted)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(
            f"{trusted} cannot verify: {_first_line(error)}. Expected a public key of the curve P-256, P-384 or P-521, "
            "or certificates, as PEM"
        ) from error


def _all_files(package: Any) -> Any:
    """Every file but the signature; model-signing would leave out those of git as well."""
    return package.hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _package() -> Any:
    try:
        import model_signing
    except ModuleNotFoundError as error:
        raise SpecError(f"signatures need {error.name}: pip install 'triton-model-repository-builder[sign]'") from error
    return model_signing


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
