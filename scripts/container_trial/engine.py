"""Find podman, buildah and runc, and run them with images, networks and settings of their own.

The images and containers of the machine's other users are neither seen nor changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.serving.plan.lines import MIN_SHARED_MEMORY

# Debian's package of each program
PACKAGES = {
    "podman": "podman",
    "buildah": "buildah",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "/usr/libexec/podman/catatonit": "catatonit",
}
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
TRIAL = "trial"  # tag of the images that are built here and removed in the end
NAME = "localhost/build-repo-trial"
NETWORK = "build-repo-trial"
CLUSTER_NETWORK = "build-repo-trial-cluster"  # names are the trial's own: podman's know nothing of readiness
ULIMITS = {"nofile": 20_000, "nproc": 4_096}  # podman's own are more than a confined root may set
RUN = Path("/run/build-repo-containers")  # state that ends with the machine
COMMAND_TIMEOUT_S = 600
MAX_OUTPUT = 600  # characters of a failed command that are shown


class TrialError(Exception):
    """A step failed. The message says what was found and what was expected."""


@dataclass(frozen=True)
class Engine:
    """Container engine whose images are in `folder`."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make podman, buildah and podman-compose use this engine's settings."""
        return {
            **os.environ,
            "PATH": SEARCH_PATH,
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
        }

    def prepare(self) -> str:
        """Write the settings: cgroups and runc without systemd, networks with names. Return what runs, in words."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ulimits = ", ".join(f'"{name}={limit}:{limit}"' for name, limit in ULIMITS.items())
        (self.folder / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = [{ulimits}]\nshm_size = "{MIN_SHARED_MEMORY}b"\n'
            '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "file"\n'
            f'tmp_dir = "{RUN / "libpod"}"\n'
            f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{self.folder / "networks"}"\n',
            "utf-8",
        )
        (self.folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.folder / "storage"}"\nrunroot = "{RUN / "storage"}"\n',
            "utf-8",
        )
        there = self.podman("network", "ls", "--format", "{{.Name}}").split()
        for network, options in ((NETWORK, ()), (CLUSTER_NETWORK, ("--disable-dns",))):
            if network not in there:
                self.podman("network", "create", *options, network)
        template = "podman {{.Version.Version}}, {{.Host.OCIRuntime.Name}}, cgroups {{.Host.CgroupsVersion}}"
        return self.podman("info", "--format", template).strip()

    def clean(self) -> str:
        """Remove all containers, pods, volumes and networks, and all images but the base images.

        Raises the first TrialError when all else is removed.
        """
        removals: tuple[Callable[[], object], ...] = (
            lambda: self.podman("pod", "rm", "--all", "--force"),
            lambda: self.podman("rm", "--all", "--force", "--time", "10"),
            lambda: self.run("buildah", "rm", "--all"),  # of builds that were interrupted
            lambda: self.podman("volume", "prune", "--force"),
            lambda: self.podman("network", "prune", "--force"),
            self._remove_built_images,
            lambda: self.podman("image", "prune", "--force"),  # of runs that were interrupted
        )
        errors = []
        for remove in removals:
            try:
                remove()
            except TrialError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return f"the base images are left in {self.folder}"

    def _remove_built_images(self) -> None:
        images = self.podman("images", "--format", "{{.Repository}}:{{.Tag}}").split()
        built = [image for image in images if image.endswith(f":{TRIAL}")]
        if built:
            self.podman("rmi", "--force", *built)

    def podman(self, *arguments: str | Path, timeout: float = COMMAND_TIMEOUT_S) -> str:
        """Return the output of podman. Raises TrialError."""
        return self.run("podman", *arguments, timeout=timeout)

    def run(self, *command: str | Path, timeout: float = COMMAND_TIMEOUT_S) -> str:
        """Return the output of a command with this engine's settings. Raises TrialError."""
        return run_command(command, self.environment, timeout)

    def has_image(self, name: str) -> bool:
        """Return True if an image of this name is there."""
        return bool(self.podman("images", "--quiet", name).strip())


def run_command(command: Sequence[str | Path], environment: Mapping[str, str], timeout: float) -> str:
    """Return the output of a command. Raises TrialError with its last words."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise TrialError(f"{' '.join(words[:3])} did not end within {timeout:.0f} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing")[-MAX_OUTPUT:]
        raise TrialError(f"{' '.join(words[:3])} ended with status {done.returncode}: {said}")
    return done.stdout


def missing_packages() -> list[str]:
    """Return the Debian packages of the programs that the machine lacks."""
    return [package for program, package in PACKAGES.items() if shutil.which(program, path=SEARCH_PATH) is None]
