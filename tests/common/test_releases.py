"""The table of Triton releases is complete, sorted and correct."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from builder.building.verify.recording import STEPS
from builder.commands.build_one import older_than_fixes
from builder.common.releases import FIXES, NEWEST, RELEASES, missing_fixes, version_tuple
from builder.options import make_spec
from builder.serving.server.embedded import EMBEDDED
from scripts.release_matrix import seq2seqs


def test_default_release_is_the_newest() -> None:
    assert max(RELEASES, key=version_tuple) == NEWEST
    assert make_spec(model="x").triton == NEWEST


def test_releases_are_sorted_and_never_downgrade_an_engine() -> None:
    assert list(RELEASES) == sorted(RELEASES, key=version_tuple)
    for engine in ("onnxruntime", "openvino", "python", "cuda"):
        versions = [version_tuple(getattr(release, engine)) for release in RELEASES.values()]
        assert versions == sorted(versions), engine


def test_releases_have_the_openvino_and_vllm_of_tritons_branches() -> None:
    openvino = {name: RELEASES[name].openvino for name in ("24.04", "24.05", "24.06", "24.09", "25.07", "26.08")}
    assert openvino == {
        "24.04": "2023.3.0",
        "24.05": "2023.3.0",
        "24.06": "2024.0.0",
        "24.09": "2024.0.0",
        "25.07": "2025.1.0",
        "26.08": "2026.3.0",
    }
    assert (RELEASES["24.10"].vllm, RELEASES["26.07"].vllm) == ("0.5.5", "0.24.0")


def test_older_than_fixes_names_the_missing_security_fixes() -> None:
    assert older_than_fixes(NEWEST) == ""
    assert older_than_fixes("26.07") == ""
    assert [fix.since for fix in missing_fixes("26.06")] == ["26.07"]
    text = older_than_fixes("24.10")
    assert re.search(r"CVE-2025-23310.*CVE-2025-23334.*restricted", text)
    assert f"Build for {NEWEST} if you can (--triton)" in text
    assert [fix.since for fix in FIXES] == sorted((fix.since for fix in FIXES), key=version_tuple)
    assert {fix.since for fix in FIXES} <= set(RELEASES)


def test_embedded_server_lacks_a_fix_so_it_binds_to_loopback() -> None:
    assert any("CVE-2025-23319" in fix.source for fix in missing_fixes(EMBEDDED))


def test_release_matrix_runs_the_beam_search_of_encoder_decoders(tmp_path: Path) -> None:
    row = next(seq2seqs("t5", tmp_path))
    asked = Counter(name for name, _ in row.case(row.own).job["calls"])
    assert asked["likeliest"] == STEPS // 2, "one for each token of the search"
    assert asked["run"], "and steps that nobody searches in"
