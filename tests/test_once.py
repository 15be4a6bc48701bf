"""Resources that workers share are created once and, after a failure, again by the next worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.once import changed, once


def test_once_raises_the_error_in_each_worker(tmp_path: Path) -> None:
    """The next worker must not fail on files left by the failed attempt."""
    folder, calls = tmp_path / "shared", []

    def make(fails: bool) -> None:
        (folder / "repository").mkdir()
        assert not fails, "no room"
        calls.append(folder)

    for _ in range(2):
        with pytest.raises(AssertionError, match="no room"):
            once(folder, lambda: make(fails=True))
    for _ in range(2):
        once(folder, lambda: make(fails=False))
    assert calls == [folder]
    assert (folder / "repository").is_dir()


def test_changed_lists_every_hard_link_of_a_modified_file(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    once(one, lambda: [(one / name).write_text(name) for name in ("kept", "weights", "gone")])
    once(other, lambda: (other / "linked").hardlink_to(one / "weights"))
    assert changed(one) == changed(other) == []
    (other / "linked").write_text("others")
    (one / "gone").unlink()
    (one / "more").touch()
    assert changed(one) == [str(one / "gone"), str(one / "weights")]
    assert changed(other) == [str(other / "linked")]
