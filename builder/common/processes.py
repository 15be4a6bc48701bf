"""Counters of Linux in the files of /proc that have a name, a number and kB in each line."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")


def read_counter(file: str, field: str) -> int | None:
    """Return the bytes of `field` in `file` below /proc: proc_meminfo(5), proc_pid_status(5), proc_pid_smaps(5).

    None if the process has ended or may not be looked at, or if there is no /proc.
    """
    try:
        lines = (PROC / file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
