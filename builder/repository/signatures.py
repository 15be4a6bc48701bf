"""Signatures of models: they prove who published each version, and that nothing in it has changed since.

Each version folder has one, in the format of OpenSSF's model-signing (a Sigstore bundle; no network is asked). It goes
where the version goes: another version, a rollback or another model leaves it as it is. A file beside the version
folders must be a copy of one in a signed version, or be listed in its signed build.json. Knows files and keys.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.common.distribution import installing
from builder.common.errors import RepositoryError, SpecError, first_line
from builder.common.hashing import sha256_of
from builder.repository.config.render import parse
from builder.repository.sharing.hosting import MODELS, hosted_repositories, read_hosted, refuse_other
from builder.repository.versions import CONFIG, REPORT, entry_names, loaded_numbers, version_numbers
from builder.runtime.contract import HOSTED, ContractError

SIGNATURE = "model.sig"  # the file name that model-signing uses
WARM_UP = "warmup"  # a folder of each version in it
HOW = "build-repo sign --key FILE"

Which = Callable[[Path], Sequence[int]]  # selects some versions of the model in a folder


@dataclass(frozen=True)
class Signer:
    """Signer of models.

    `key`: a private key (PEM; an elliptic curve's). `certificate`: its certificate, and `chain` those between it and
    the trusted one; None if the key itself is trusted.
    """

    key: Path
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()


def sign(repository: Path, signer: Signer, names: Sequence[str] = ()) -> list[str]:
    """Sign every version of the models `names` and of their engines, or of all; return what was signed, as NAME/N.

    Raises SpecError for a key that cannot be used, RepositoryError for a model that is not there or has links in it.
    """
    wanted = _named_folders(repository, names)
    configuration = _signing(signer)
    signed = []
    for version in [folder / str(number) for folder in wanted.values() for number in version_numbers(folder)]:
        called, unfinished = f"{version.parent.name}/{version.name}", repository / f".{version.parent.name}.{SIGNATURE}"
        if not (version / CONFIG).is_file():
            raise RepositoryError(f"{called} has no {CONFIG} of its own, which is to be signed; build it again")
        try:
            configuration.sign(version, unfinished)
        except (OSError, ValueError) as error:
            raise RepositoryError(f"{called} cannot be signed: {error}") from error
        os.replace(unfinished, version / SIGNATURE)
        signed.append(called)
    for hosted in hosted_repositories(repository):
        if hosted.parent.name in wanted and read_hosted(hosted):
            signed += [f"{hosted.parent.name}/{MODELS}/{called}" for called in sign(hosted, signer)]
    return signed


def unsigned(repository: Path, trusted: Path, names: Sequence[str] = (), which: Which = version_numbers) -> list[str]:
    """Return why each model is not the one that was signed, as sentences with its name; empty if all signatures hold.

    `trusted`: a public key, or the certificates (PEM) that a signer's own must lead to; `names`: check only these
    models and their engines; `which`: check only these versions. Raises SpecError if `trusted` is neither,
    RepositoryError for a model that is not there.
    """
    configuration, wanted = _verifying(trusted), _named_folders(repository, names, which)
    hosting = [hosted for hosted in hosted_repositories(repository) if hosted.parent.name in wanted]
    problems = {name: _unsigned(folder, which(folder), configuration, trusted) for name, folder in wanted.items()}
    return [f"{name}: {problem}" for name, each in problems.items() for problem in each] + [
        sentence for hosted in hosting for sentence in _unsigned_hosted(hosted, trusted)
    ]


def to_be_loaded(folder: Path) -> list[int]:
    """Return the versions of a model that Triton loads by its config.pbtxt; all if it names none or is unreadable."""
    try:
        return loaded_numbers(folder) or version_numbers(folder)
    except (RepositoryError, OSError, ValueError):
        return version_numbers(folder)


def trusted_text(trusted: Path) -> str:
    """Return the trusted key or certificates as text to hand to others (PEM).

    Raises SpecError if the file has neither, or a private key beside them.
    """
    _verifying(trusted)
    text = trusted.read_text("ascii", "replace")
    if "PRIVATE KEY" in text:
        raise SpecError(f"{trusted} has a private key in it, which nobody else may have: give the public one alone")
    return text


def _unsigned_hosted(repository: Path, trusted: Path) -> Iterator[str]:
    """Yield the problems of the models of a shared front, including those that hosted.json describes wrongly."""
    prefix = f"{repository.parent.name}/{repository.name}"
    hosted = read_hosted(repository)
    if hosted:
        yield from (f"{prefix}/{sentence}" for sentence in unsigned(repository, trusted))
    for name in hosted:
        try:
            refuse_other(hosted, name, repository)
        except (RepositoryError, ContractError) as error:
            yield f"{prefix}/{name}: {error}"
        except (OSError, ValueError) as error:
            yield f"{prefix}/{name}: {_not_read(error)}"


def _unsigned(folder: Path, there: Sequence[int], configuration: Any, trusted: Path) -> list[str]:
    """Return why versions of one model are not what was signed; also that they cannot be read, or are just removed."""
    try:
        return [*_unsigned_versions(folder, there, configuration, trusted), *_beside(folder, there)]
    except (OSError, ValueError) as error:
        return [_not_read(error)]


def _not_read(error: Exception) -> str:
    return f"it cannot be verified, for it cannot be read ({first_line(error)}); where it is being changed, try again"


def _unsigned_versions(folder: Path, there: Sequence[int], configuration: Any, trusted: Path) -> Iterator[str]:
    if not there:
        yield f"it has no version that was signed; whoever published it can sign it: {HOW}"
    for number in there:
        yield from _problems(folder / str(number), configuration, trusted)
        yield from _mixed(folder / str(number))


def _problems(version: Path, configuration: Any, trusted: Path) -> Iterator[str]:
    if not (version / SIGNATURE).is_file():
        yield f"version {version.name} is not signed (no {version.name}/{SIGNATURE}); whoever published it can: {HOW}"
        return
    try:
        configuration.verify(version, version / SIGNATURE)
    except ValueError as error:
        if str(error).startswith("Signature mismatch"):  # the signature itself is good
            yield from (f"{version.name}/{problem}" for problem in _changes(version))
        else:
            yield _not_held(version, error, trusted)
        return
    except Exception as error:  # a damaged signature makes the libraries raise many types
        yield _not_held(version, error, trusted)
        return
    yield from _moved(version)


def _mixed(version: Path) -> Iterator[str]:
    """Yield a problem if a front and its engine of one number are of two builds.

    The report of each lists the files of both.
    """
    own = _files(version)
    for mate in own if version.parent.name in own else ():
        other = version.parent.parent / mate / version.name
        if mate != version.parent.name and other.is_dir() and _files(other).get(mate) != own[mate]:
            yield f"version {version.name} of {mate} beside it is of another build"


def _files(version: Path) -> dict[str, Any]:
    """Return the files of a version's build that its report lists, by model; empty if it has no report."""
    try:
        hashes = json.loads((version / REPORT).read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return hashes if isinstance(hashes, dict) else {}


def _moved(version: Path) -> Iterator[str]:
    """Yield a problem if a version whose signature is good was signed under another name or number."""
    number, config = _statement(version)["subject"][0]["name"], version / CONFIG
    name = parse(config.read_text("utf-8"), version.parent.name).name if config.is_file() else ""
    if (name, number) != (version.parent.name, version.name):
        yield f"version {version.name} was signed as version {number} of {name or 'a model without a name'}"


def _beside(folder: Path, there: Sequence[int]) -> Iterator[str]:
    """Yield the files beside the version folders that differ from those of every version in `there`, or are missing."""
    versions = {str(number): folder / str(number) for number in there}
    others = set(map(str, version_numbers(folder))) - set(versions)
    for wanted in (CONFIG, REPORT):
        if not (folder / wanted).exists() and any((version / wanted).is_file() for version in versions.values()):
            yield f"{wanted} is missing beside its versions"
    for path in sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink()):
        name = path.relative_to(folder)
        if name.parts[0] in versions or (name.parts[0] == MODELS and (folder / MODELS / HOSTED).is_file()):
            continue
        if name.parts[0] in others or (name.parts[0] == WARM_UP and name.parts[1:2] and name.parts[1] in others):
            continue  # files of a version that Triton does not load
        if path.is_symlink() or not any(_is_of(name, path, version) for version in versions.values()):
            yield f"{name} is not what a version of it says"


def _is_of(name: Path, path: Path, version: Path) -> bool:
    """Return True if the file `path`, called `name` beside `version`, is a copy of its file, or one that it lists."""
    own = version / name
    if str(name) == CONFIG and own.is_file():
        return _without_policy(own) == _without_policy(path)
    if own.is_file():
        return own.read_bytes() == path.read_bytes()
    try:
        listed = json.loads((version / REPORT).read_text("utf-8"))["files"][version.parent.name]
        return bool(listed[name.as_posix()] == sha256_of(path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _without_policy(config: Path) -> Any:
    """Return a configuration without its version policy; None if it does not parse."""
    try:
        parsed = parse(config.read_text("utf-8"), config.parent.name)
    except RepositoryError:
        return None
    parsed.ClearField("version_policy")
    return parsed


def _not_held(version: Path, error: Exception, trusted: Path) -> str:
    reason = first_line(error)[:200]
    return f"the signature of version {version.name} does not hold: {reason}; expected one by {trusted.name}"


def _changes(folder: Path) -> Iterator[str]:
    """Yield a sentence for each file that has changed since the version was signed. Its signature itself is good."""
    signed = {item["name"]: item["digest"] for item in _statement(folder)["predicate"]["resources"]}
    here = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    here.pop(SIGNATURE, None)
    yield from (f"{name} was added after it was signed" for name in here if name not in signed)
    yield from (f"{name} was removed after it was signed" for name in signed if name not in here)
    for name in signed:
        if name in here and sha256_of(here[name]) != signed[name]:
            yield f"{name} was changed after it was signed"


def _statement(folder: Path) -> Any:
    """Return what a signature states: an in-toto statement. The signature must be verified already."""
    bundle = json.loads((folder / SIGNATURE).read_text("utf-8"))
    return json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))


def _folders(repository: Path) -> dict[str, Path]:
    """Return the folders of the models: Triton takes every folder for one. Raises RepositoryError if there is none."""
    folders = {path.name: path for path in sorted(repository.iterdir()) if path.is_dir()} if repository.is_dir() else {}
    if not folders:
        raise RepositoryError(f"{repository} holds no model; build one first: build-repo MODEL --output {repository}")
    return folders


def _named_folders(repository: Path, names: Sequence[str], which: Which = version_numbers) -> dict[str, Path]:
    """Return the folders of `names` and of their engines; all if none are named."""
    try:
        folders = _folders(repository)
        named = dict.fromkeys(entry for name in names for entry in _with_engine(folders, repository, name, which))
    except OSError as error:
        raise RepositoryError(f"{repository} cannot be read: {error}") from error
    return {name: folders[name] for name in named} or folders


def _with_engine(folders: Mapping[str, Path], repository: Path, name: str, which: Which) -> list[str]:
    """Return the folders of a model: its own, and those of the engines that its versions `which` load.

    The versions say which, for they are signed. Raises RepositoryError if the model is not there.
    """
    if name not in folders:
        raise RepositoryError(f"{repository} has no model {name}; it has {', '.join(folders)}")
    built = [entry for number in which(folders[name]) for entry in entry_names(repository, name, number)]
    return [name, *(entry for entry in built if entry in folders)]


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
            f"{signer.key} cannot sign: {first_line(error)}. Expected a private key of the curve P-256, P-384 or "
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
            f"{trusted} cannot verify: {first_line(error)}. Expected a public key of the curve P-256, P-384 or P-521, "
            "or certificates, as PEM"
        ) from error


def _all_files(package: Any) -> Any:
    """Return options that hash every file but the signature; model-signing would leave out those of git as well."""
    return package.hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _package() -> Any:
    try:
        import model_signing
    except ModuleNotFoundError as error:
        raise SpecError(f"signatures need {error.name}: {installing('sign')}") from error
    return model_signing
