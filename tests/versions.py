"""Create further versions of a model without a build, from the files of an existing one."""

from __future__ import annotations

import shutil
from pathlib import Path

from builder.repository.versions import entry_names


def copy_version(repository: Path, name: str, copy: int) -> None:
    """Copy version 1 of a model to version `copy`, without a compiled plan. The copy is not served."""
    for entry in (repository / mate for mate in entry_names(repository, name, 1)):
        ignored = shutil.ignore_patterns("*.plan")
        shutil.copytree(entry / "1", entry / str(copy), ignore=ignored)
        if (entry / "warmup").is_dir():
            shutil.copytree(entry / "warmup" / "1", entry / "warmup" / str(copy))
        for file in ("build.json", "config.pbtxt"):
            text = (entry / str(copy) / file).read_text()
            for form in ('"{}/', '"version": {}', "versions: [ {} ]"):
                text = text.replace(form.format(1), form.format(copy))
            (entry / str(copy) / file).write_text(text)
