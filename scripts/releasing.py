"""Make a release of the project: its version, its section of the changelog, and the files of dist/. Pushes nothing."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from builder.common.hashing import sha256_of

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
UNRELEASED = "## [Unreleased]\n"
CHECKSUMS, PROVENANCE, SITE = "SHA256SUMS", "provenance.json", "site.tar.gz"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILDER = "urn:triton-model-repository-builder:scripts/release"
BUILD_TYPE = f"{BUILDER}:v1"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__)
    parser.add_argument("version", nargs="?", help="of the release, higher than the last")
    parser.add_argument("--artifacts-only", action="store_true", help="make the files of this commit's version alone")
    options = parser.parse_args()
    if (options.version is None) != options.artifacts_only:
        raise SystemExit("give a version, or --artifacts-only for the version of this commit")
    if _git("status", "--porcelain"):
        raise SystemExit("the working tree has changes; commit them first: a release is a commit")
    if options.version is not None:
        _commit(options.version)
    make_artifacts(DIST)
    print(f"{DIST} is ready")
    if options.version is not None:
        print(f"then: git push origin HEAD v{options.version}")


def _commit(version: str) -> None:
    project, changelog = ROOT / "pyproject.toml", ROOT / "CHANGELOG.md"
    project_text = with_version(project.read_text("utf-8"), version)
    changelog_text = with_section(changelog.read_text("utf-8"), version, datetime.now(UTC).date().isoformat())
    project.write_text(project_text, "utf-8")
    changelog.write_text(changelog_text, "utf-8")
    _git("commit", "--quiet", "--all", "--message", f"Release {version}")
    _git("tag", "--annotate", f"v{version}", "--message", f"Release {version}")


def with_version(project: str, version: str) -> str:
    """Return pyproject.toml with `version`. Raises SystemExit unless it is higher than the one that it has."""
    before = tomllib.loads(project)["project"]["version"]
    try:
        is_higher = Version(version) > Version(before)
    except InvalidVersion:
        is_higher = False
    if not is_higher:
        raise SystemExit(f"{version} is not a version higher than {before}, that of pyproject.toml")
    return project.replace(f'version = "{before}"', f'version = "{version}"', 1)


def with_section(changelog: str, version: str, date: str) -> str:
    """Return the changelog with what is under Unreleased as the section of `version`.

    Raises SystemExit if nothing is there, or the version has a section already.
    """
    if f"## [{version}]" in changelog:
        raise SystemExit(f"CHANGELOG.md has a section {version} already")
    head, found, rest = changelog.partition(UNRELEASED)
    entries = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    if not found or not re.search(r"^- ", entries, re.MULTILINE):
        raise SystemExit("CHANGELOG.md has no entries under [Unreleased]: write what changes for users")
    return f"{head}{UNRELEASED}\n## [{version}] - {date}\n{rest}"


def make_artifacts(folder: Path) -> None:
    """Write the wheel, the source distribution, the site, their provenance and checksums to `folder`, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _run("hatchling", "build", "--directory", str(folder))
    _run("twine", "check", "--strict", *map(str, sorted(folder.iterdir())))
    _run("mkdocs", "build", "--quiet", "--strict")
    with tarfile.open(folder / SITE, "w:gz") as archive:
        archive.add(ROOT / "build" / "site", "site")
    digests = digests_in(folder)
    statement = provenance(digests, _git("rev-parse", "HEAD"), datetime.now(UTC).isoformat(timespec="seconds"))
    (folder / PROVENANCE).write_text(json.dumps(statement, indent=1) + "\n", "utf-8")
    lines = [f"{digest}  {name}\n" for name, digest in digests_in(folder).items()]
    (folder / CHECKSUMS).write_text("".join(lines), "utf-8")


def digests_in(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of `folder` by its name."""
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir())}


def provenance(digests: Mapping[str, str], commit: str, finished: str) -> dict[str, Any]:
    """Return the in-toto statement that `digests` were made of `commit` by this script.

    Source: SLSA 1.0, provenance (https://slsa.dev/spec/v1.0/provenance).
    """
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"command": "scripts/release --artifacts-only"},
                "resolvedDependencies": [{"digest": {"gitCommit": commit}}],
            },
            "runDetails": {
                "builder": {"id": BUILDER},
                "metadata": {"finishedOn": finished},
            },
        },
    }


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
