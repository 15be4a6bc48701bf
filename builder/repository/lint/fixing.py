"""Write the edits of findings into config.pbtxt (--fix), if the result is the same configuration with them.

A configuration that is a link, is signed, or has a syntax that an edit does not fit, is left unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from builder.common.errors import RepositoryError
from builder.repository.lint.findings import Edit, Finding
from builder.repository.lint.pbtxt import edited
from builder.repository.signing_keys import SIGNATURE


def fix(repository: Path, findings: Sequence[Finding]) -> list[str]:
    """Apply the edits of `findings`; return a sentence for each file that was changed or left unchanged.

    Raises RepositoryError if a configuration cannot be written.
    """
    edits: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.fix is not None:
            edits.setdefault((finding.model, finding.file), []).append(finding)
    return [_fix(repository / file, file, model, of_file) for (model, file), of_file in edits.items()]


def _fix(path: Path, file: str, model: str, findings: Sequence[Finding]) -> str:
    codes: dict[Edit, str] = {finding.fix: finding.code for finding in findings if finding.fix is not None}
    changes = ", ".join(f"{edit} ({code})" for edit, code in codes.items())
    if path.is_symlink():
        return f"{file}: left as it is: it is a link. By hand: {changes}"
    if (path.parent / SIGNATURE).exists():
        return f"{file}: left as it is: the model is signed. By hand, and then sign it again: {changes}"
    try:
        text = edited(path.read_text("utf-8"), list(codes), model)
        if text is None:
            return f"{file}: left as it is: it is written in a way that is not understood here. By hand: {changes}"
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(text, "utf-8")
        unfinished.chmod(path.stat().st_mode)
        os.replace(unfinished, path)
    except UnicodeDecodeError:
        return f"{file}: left as it is: it is not UTF-8. By hand: {changes}"
    except OSError as error:
        raise RepositoryError(f"{path} cannot be written: {error.strerror or error}") from error
    return f"{file}: {changes}"
