"""Signatures of models: they prove who published each version, and that nothing in it has changed since.

Each version folder has one, in the format of OpenSSF's model-signing (a Sigstore bundle; no network is asked). It goes
where the version goes: another version, a rollback or another model leaves it as it is. A file beside the version
folders must be a copy of one in a signed version, or be listed in its signed build.json.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from builder.common.errors import RepositoryError, first_line
from builder.common.hashing import sha256_of
from builder.repository.config.render import CONFIG, parse
from builder.repository.report.evaluations import EVALUATIONS
from builder.repository.report.record import REPORT, read_object
from builder.repository.sharing.hosting import MODELS, hosted_repositories, read_hosted, refuse_other
from builder.repository.signing_keys import SIGNATURE, Signer, signing_configuration, verifying_configuration
from builder.repository.versions import entry_names, loaded_numbers, version_numbers
from builder.runtime.contract import ContractError
from builder.runtime.hosted import HOSTED

WARM_UP = "warmup"  # a folder of each version in it
SIGN_COMMAND = "build-repo sign --key FILE"

VersionSelector = Callable[[Path], Sequence[int]]  # of the versions of the model in a folder


def sign(repository: Path, signer: Signer, names: Sequence[str] = ()) -> list[str]:
    """Sign every version of the models `names` and of their engines, or of all; return the signed versions, as NAME/N.

    Raises SpecError for a key that cannot be used, RepositoryError for a model that is not there or has links in it.
    """
    folders = _named_folders(repository, names)
    configuration = signing_configuration(signer)
    signed = []
    for version in [folder / str(number) for folder in folders.values() for number in version_numbers(folder)]:
        label, unfinished = f"{version.parent.name}/{version.name}", repository / f".{version.parent.name}.{SIGNATURE}"
        if not (version / CONFIG).is_file():
            raise RepositoryError(f"{label} has no {CONFIG} of its own, which is to be signed; build it again")
        try:
            configuration.sign(version, unfinished)
        except (OSError, ValueError) as error:
            raise RepositoryError(f"{label} cannot be signed: {error}") from error
        os.replace(unfinished, version / SIGNATURE)
        signed.append(label)
    for hosted in hosted_repositories(repository):
        if hosted.parent.name in folders and read_hosted(hosted):
            signed += [f"{hosted.parent.name}/{MODELS}/{label}" for label in sign(hosted, signer)]
    return signed


def unsigned(
    repository: Path, trusted: Path, names: Sequence[str] = (), which: VersionSelector = version_numbers
) -> list[str]:
    """Return why models are not those that were signed, as sentences with their names; empty if none.

    `trusted`: a public key, or the certificates (PEM) that a signer's own must lead to; `names`: check only these
    models and their engines; `which`: check only these versions. Raises SpecError if `trusted` is neither,
    RepositoryError for a model that is not there.
    """
    configuration, folders = verifying_configuration(trusted), _named_folders(repository, names, which)
    problems = [
        f"{name}: {problem}"
        for name, folder in folders.items()
        for problem in _unsigned(folder, which(folder), configuration, trusted)
    ]
    for hosted in hosted_repositories(repository):
        if hosted.parent.name in folders:
            problems += _unsigned_hosted(hosted, trusted)
    return problems


def to_be_loaded(folder: Path) -> list[int]:
    """Return the versions of a model that Triton loads by its config.pbtxt; all if it names none or is unreadable."""
    try:
        return loaded_numbers(folder) or version_numbers(folder)
    except (RepositoryError, OSError, ValueError):
        return version_numbers(folder)


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
            yield f"{prefix}/{name}: {_unreadable(error)}"


def _unsigned(folder: Path, numbers: Sequence[int], configuration: Any, trusted: Path) -> list[str]:
    """Return why versions of one model are not what was signed, or that they cannot be read or are being removed."""
    problems = []
    if not numbers:
        problems.append(f"it has no version that was signed; whoever published it can sign it: {SIGN_COMMAND}")
    try:
        for version in [folder / str(number) for number in numbers]:
            problems += [*_problems(version, configuration, trusted), *_mixed(version)]
        return [*problems, *_beside(folder, numbers)]
    except (OSError, ValueError) as error:
        return [_unreadable(error)]


def _unreadable(error: Exception) -> str:
    return f"it cannot be verified, for it cannot be read ({first_line(error)}); where it is being changed, try again"


def _problems(version: Path, configuration: Any, trusted: Path) -> Iterator[str]:
    """Yield why a version is not what was signed, under its name and number."""
    if not (version / SIGNATURE).is_file():
        missing = f"version {version.name} is not signed (no {version.name}/{SIGNATURE})"
        yield f"{missing}; whoever published it can: {SIGN_COMMAND}"
        return
    try:
        configuration.verify(version, version / SIGNATURE)
    except Exception as error:  # a damaged signature makes the libraries raise many types
        is_mismatch = isinstance(error, ValueError) and str(error).startswith("Signature mismatch")
        if is_mismatch:  # the signature itself is good
            yield from (f"{version.name}/{problem}" for problem in _changes(version))
        else:
            reason = f"the signature of version {version.name} does not hold: {first_line(error)[:200]}"
            yield f"{reason}; expected one by {trusted.name}"
        return
    number, config = _statement(version)["subject"][0]["name"], version / CONFIG
    name = parse(config.read_text("utf-8"), version.parent.name).name if config.is_file() else ""
    if (name, number) != (version.parent.name, version.name):
        yield f"version {version.name} was signed as version {number} of {name or 'a model without a name'}"


def _mixed(version: Path) -> Iterator[str]:
    """Yield a problem if a front and its engine of one number are of two builds.

    The report of each lists the files of both.
    """
    files = _files(version)
    for entry in files if version.parent.name in files else ():
        other = version.parent.parent / entry / version.name
        if entry != version.parent.name and other.is_dir() and _files(other).get(entry) != files[entry]:
            yield f"version {version.name} of {entry} beside it is of another build"


def _files(version: Path) -> dict[str, Any]:
    """Return the files of a version's build that its report lists, by model; empty if it has no report."""
    files = read_object(version / REPORT).get("files")
    return files if isinstance(files, dict) else {}


def _beside(folder: Path, numbers: Sequence[int]) -> Iterator[str]:
    """Yield the files beside the version folders that are missing, or in none of the versions `numbers`."""
    versions = {str(number): folder / str(number) for number in numbers}
    others = set(map(str, version_numbers(folder))) - set(versions)
    for file in (CONFIG, REPORT):
        if not (folder / file).exists() and any((version / file).is_file() for version in versions.values()):
            yield f"{file} is missing beside its versions"
    for path in sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink()):
        name = path.relative_to(folder)
        if name == Path(EVALUATIONS) and not path.is_symlink():
            continue  # no server reads it, and it is written after the version was signed
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
    listed = _files(version).get(version.parent.name)
    digest = listed.get(name.as_posix()) if isinstance(listed, dict) else None
    return digest is not None and bool(digest == sha256_of(path))


def _without_policy(config: Path) -> Any:
    """Return a configuration without its version policy; None if it does not parse."""
    try:
        parsed = parse(config.read_text("utf-8"), config.parent.name)
    except RepositoryError:
        return None
    parsed.ClearField("version_policy")
    return parsed


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
    """Return the content of a signature: an in-toto statement. The signature must be verified already."""
    bundle = json.loads((folder / SIGNATURE).read_text("utf-8"))
    return json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))


def _named_folders(repository: Path, names: Sequence[str], which: VersionSelector = version_numbers) -> dict[str, Path]:
    """Return the folders of `names`, and of the engines that their versions, those of `which`, name.

    All if none are named: Triton takes every folder for a model. Raises RepositoryError if a model is not there.
    """
    try:
        paths = sorted(repository.iterdir()) if repository.is_dir() else []
        folders = {path.name: path for path in paths if path.is_dir()}
        if not folders:
            raise RepositoryError(
                f"{repository} holds no model; build one first: build-repo MODEL --output {repository}"
            )
        named: dict[str, Path] = {}
        for name in names:
            if name not in folders:
                raise RepositoryError(f"{repository} has no model {name}; it has {', '.join(folders)}")
            built = [entry for number in which(folders[name]) for entry in entry_names(repository, name, number)]
            named |= {entry: folders[entry] for entry in (name, *built) if entry in folders}
    except OSError as error:
        raise RepositoryError(f"{repository} cannot be read: {error}") from error
    return named or folders
