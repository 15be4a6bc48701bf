"""Examine the software: the project's requirements, engines, the embedded Triton, extras."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, metadata, version

from packaging.requirements import Requirement

from builder.common.distribution import DISTRIBUTION, installing, installing_here, own_version
from builder.common.engines import ENGINES
from builder.common.errors import ServeError, first_line
from builder.serving.doctor.finding import Finding
from builder.serving.server.embedded import EMBEDDED, find_stub, wheel_folder
from builder.serving.server.refusals import refuse_machine

EVERYTHING = "all"  # the extra that names the others which users install
IN_A_CONTAINER = "serve in a container: docker compose --profile cpu up"


def find_software() -> Finding:
    found = f"build-repo {own_version()} in Python {platform.python_version()}"
    unmet = unmet_requirements()
    if not unmet:
        return Finding("software", found)
    advice = f"install it again: {installing_here(f'{DISTRIBUTION}=={own_version()}')}"
    return Finding("software", f"{found}, without {', '.join(unmet)}", advice, stops=True)


def unmet_requirements(extra: str = "") -> list[str]:
    """Return the requirements that this environment does not meet: of an extra, by default of the project itself."""
    unmet = []
    for requirement in _requirements(extra):
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            unmet.append(requirement.name)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            unmet.append(f"{requirement.name} {requirement.specifier} (found {installed})")
    return unmet


def _requirements(extra: str) -> list[Requirement]:
    """Return what an extra adds to the project's requirements; for "", those requirements."""
    every = [Requirement(line) for line in distribution(DISTRIBUTION).requires or ()]
    return [one for one in every if _applies(one, extra) and not (extra and _applies(one, ""))]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def find_engines() -> Iterator[Finding]:
    """Yield a finding for each engine that builds can be asked for and that is a package here."""
    for facts in ENGINES.values():
        if facts.package is None or not facts.targets:
            continue
        try:
            yield Finding(facts.title, version(facts.package))
        except PackageNotFoundError:
            yield Finding(facts.title, f"not installed: {installing(facts.extra or EVERYTHING)}", absent=True)


def find_triton() -> Finding:
    """Return whether `build-repo serve` can start its Triton; a build does not need it."""
    try:
        folder = wheel_folder()
        find_stub(folder)
        refuse_machine()
        program = [str(folder / "bin" / "tritonserver"), "--help"]
        done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    except ServeError as error:
        return Finding("Triton", "build-repo serve does not work", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("Triton", f"{EMBEDDED} does not start: {first_line(error)}", IN_A_CONTAINER)
    if "Usage" not in done.stdout + done.stderr:  # its exit status is 1 in any case
        return Finding("Triton", f"{EMBEDDED} does not start: {done.stderr.strip()[:200]}", IN_A_CONTAINER)
    return Finding("Triton", f"{EMBEDDED}, which build-repo serve starts")


def _extras() -> list[str]:
    """Return the extras for users: `all` and those that are a part of it."""
    every = {one.name for one in _requirements(EVERYTHING)}
    offered = metadata(DISTRIBUTION).get_all("Provides-Extra") or ()
    return [name for name in offered if {one.name for one in _requirements(name)} <= every]


def find_extras() -> Finding:
    """Return which extras are installed, and how to install the others."""
    names = [name for name in _extras() if name != EVERYTHING]
    unmet = [name for name in names if unmet_requirements(name)]
    here = ", ".join(name for name in names if name not in unmet) or "none"
    others = f"; not installed: {', '.join(unmet)} ({installing('EXTRA')})" if unmet else ""
    return Finding("extras", f"{here}{others}")
