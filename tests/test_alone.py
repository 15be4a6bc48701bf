"""scripts/test runs tests marked `alone` after the others, and fails if either part fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEST = """
import os
import pytest

def test_beside_others():
    assert os.environ["ALONE"] == "without" and {beside}

@pytest.mark.alone
def test_that_loads_all_cores():
    assert os.environ["ALONE"] == "only" and {alone}
"""


def _exit_status(folder: Path, *options: str, beside: bool = True, alone: bool = True) -> int:
    """Return the exit status of scripts/test on a project of two tests, one of them marked `alone`."""
    files = {
        "scripts/setup": f'cd "{folder}"\nexport PATH="{Path(sys.executable).parent}:$PATH"\n',
        "pytest.ini": "[pytest]\nmarkers = alone\n",
        "tests/test_file.py": TEST.format(beside=beside, alone=alone),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in ("scripts/test", "tests/alone.py"):
        shutil.copy(ROOT / name, folder / name)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    command = [str(folder / "scripts" / "test"), "-n", "0", *options]
    return subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False).returncode


@pytest.mark.parametrize("beside", [True, False])
def test_exit_status_is_one_where_either_part_fails(beside: bool, tmp_path: Path) -> None:
    assert _exit_status(tmp_path, beside=beside, alone=not beside) == 1


@pytest.mark.parametrize("select", ["others", "cores"])
def test_exit_status_is_zero_where_only_one_part_has_tests(select: str, tmp_path: Path) -> None:
    failing = {"others": "alone", "cores": "beside"}[select]
    assert _exit_status(tmp_path, "-k", select, **{failing: False}) == 0


@pytest.mark.parametrize(("options", "status"), [(("-k", "nothing"), 5), (("--no-such-option",), 4)])
def test_exit_status_is_pytests_where_nothing_ran(options: tuple[str, ...], status: int, tmp_path: Path) -> None:
    assert _exit_status(tmp_path, *options) == status
