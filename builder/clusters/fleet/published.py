"""Published version of a model that is to be built: the report of its newest version."""

from __future__ import annotations

from pathlib import Path

from builder.common.errors import RepositoryError
from builder.options import BuildSpec
from builder.repository.report.record import REPORT, BuildReport, parse_report, read_report
from builder.repository.stores.store import open_store
from builder.repository.versions import version_numbers


def newest_report(spec: BuildSpec) -> BuildReport | None:
    """Return the report of the newest version, whose files must all be there; None if there is none.

    The newest counts, whichever is served: building the same again does not undo a rollback. Raises RepositoryError.
    """
    if spec.store is not None:
        return _in_store(spec.store, spec.entry_name)
    return _in_folder(spec.output, spec.entry_name)


def _in_folder(output: Path, name: str) -> BuildReport | None:
    folder = output / name
    versions = version_numbers(folder)
    if not versions:
        return None
    report = read_report(folder, str(versions[-1]))
    files = [output / entry / path for entry in report.files for path in report.files[entry]]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise RepositoryError(f"{missing} is missing")
    return report


def _in_store(url: str, name: str) -> BuildReport | None:
    store = open_store(url)
    versions = store.versions(name)
    if not versions:
        return None
    manifest, path = store.manifest(name, versions[-1]), f"{name}/{versions[-1]}/{REPORT}"
    if path not in manifest.files:
        raise RepositoryError(f"{url} has no {path}")
    return parse_report(store.read(manifest.files[path]), f"{url}/{path}")
