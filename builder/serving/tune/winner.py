"""Write settings into a models.yaml, with the reason as a comment; the rest of the file stays as written."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.common.distribution import installing
from builder.common.errors import SpecError
from builder.options import load_entries


def write_settings(path: Path, name: str, settings: Mapping[str, object], reason: str) -> None:
    """Set `settings`, dotted keys, of the model `name` in the models.yaml at `path`. Raises SpecError.

    The result is read as specifications before it replaces the file.
    """
    places = {entry.spec.entry_name: entry.origin for entry in load_entries(path)}
    if name not in places:
        raise SpecError(f"{path} has no model {name}; it has {', '.join(places)}")
    position = places[name]
    if position.file != path or not position.alone:
        raise SpecError(
            f"{name} is made of {position}, by `include`, `matrix` or a pattern: give it an entry of its own"
        )
    yaml = _yaml()
    document = yaml.load(path.read_text("utf-8"))
    entry = document["models"][position.position]
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = entry
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = type(place)()
            place = place[parent]
        place[last] = value
    first = next(iter(settings)).split(".")[0]
    entry.yaml_set_comment_before_after_key(first, before=reason, indent=entry.lc.col)
    text = io.StringIO()
    yaml.dump(document, text)
    unfinished = path.with_suffix(".unfinished.yaml")
    try:
        unfinished.write_text(text.getvalue(), "utf-8")
        load_entries(unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise SpecError(
            f"{path} cannot be written ({error.strerror}): the version that was published has the settings"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _yaml() -> Any:
    try:
        from ruamel.yaml import YAML
    except ModuleNotFoundError:
        raise SpecError(f"this needs the extra tune: {installing('tune')}") from None
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml
