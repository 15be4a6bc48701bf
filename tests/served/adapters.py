"""A version with an adapter held_NAME.py of this folder, and the emitted one, called emitted.py, beside it."""

from __future__ import annotations

from pathlib import Path


def held_files(version: Path, name: str) -> dict[str, bytes]:
    """Return the files of `version` that change, or are added, with the adapter held_NAME.py."""
    ours = Path(__file__).with_name(f"held_{name}.py").read_bytes()
    return {"emitted.py": (version / "model.py").read_bytes(), "model.py": ours}


def put_held(entry: Path, name: str, place: Path) -> None:
    """Give version 1 of the model in the folder `entry` the adapter held_NAME.py, whose parameter is `place`."""
    for path, content in held_files(entry / "1", name).items():
        (entry / "1" / path).write_bytes(content)
    with (entry / "config.pbtxt").open("a") as config:
        config.write(f'parameters {{ key: "place" value {{ string_value: "{place}" }} }}\n')
