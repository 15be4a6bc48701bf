"""Tests that share a fixture, directly or not, run on one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharing import group_of

CONFTEST = """
import pytest
@pytest.fixture(scope="session")
def store(): ...
"""
FILE = """
import pytest
@pytest.fixture(scope="module")
def site(): ...
@pytest.fixture
def page(site): ...
@pytest.fixture
def shop(store): ...
@pytest.fixture
def client(client): ...
def _helper(server: object): ...
def test_by_another_fixture(page): ...
def test_of_the_folder(shop): ...
def test_of_the_served_repository(client): ...
async def test_of_both(site, client): ...
@pytest.mark.parametrize("name", ["a::b"])
def test_alone(name, tmp_path, checkpoint): ...
def test_by_keyword(tmp_path, *, page): ...
@pytest.mark.usefixtures("tmp_path", "page")
def test_by_a_mark(): ...
@pytest.fixture
def maybe(request):
    return request.getfixturevalue("store") if request.param else None
def test_at_its_run(maybe): ...
"""
EVERYWHERE = """
import pytest
@pytest.fixture(scope="module", autouse=True)
def site(): ...
def test_any(): ...
"""
OWN = """
import pytest
@pytest.fixture
def repository(tmp_path): ...
def test_of_its_own(repository): ...
"""


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("by_another_fixture", "test_file.py"),
        ("of_the_folder", "conftest.py"),
        ("of_the_served_repository", "served"),
        ("of_both", "served"),
        ("alone[a::b]", None),
        ("by_keyword", "test_file.py"),
        ("by_a_mark", "test_file.py"),
        ("at_its_run", "conftest.py"),
    ],
)
def test_group_of_a_test_is_where_its_shared_fixture_is_defined(test: str, group: str | None, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_file.py").write_text(FILE)
    expected = str(tmp_path / group) if group and group.endswith(".py") else group
    assert group_of(f"{tmp_path}/test_file.py::test_{test}") == expected


def test_group_of_a_local_repository_is_not_the_served_one(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN)
    assert group_of(f"{tmp_path}/test_own.py::test_of_its_own") is None


def test_autouse_fixture_groups_the_tests_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(EVERYWHERE)
    assert group_of(f"{tmp_path}/test_file.py::test_any") == f"{tmp_path}/test_file.py"
