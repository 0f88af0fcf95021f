"""Check what ``--format llmkube`` writes against LLMKube's own definitions of its objects.

    python -m tools.comparisons.llmkube MODELS.yaml INFERENCESERVICES.yaml OBJECTS.yaml…

The first two are ``config/crd/bases/inference.llmkube.dev_….yaml`` of https://github.com/defilantech/LLMKube, the
others what fitter wrote. Unknown fields are errors, although the API server would only drop them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml


def schemas(files: list[Path]) -> dict[str, Any]:
    """The schema of each kind."""
    found = {}
    for file in files:
        definition = yaml.safe_load(file.read_text())["spec"]
        (version,) = (each for each in definition["versions"] if each["storage"])
        found[definition["names"]["kind"]] = _strict(version["schema"]["openAPIV3Schema"])
    return found


def problems(kinds: Mapping[str, Any], text: str) -> Iterator[str]:
    """What is wrong with the objects of a file."""
    for each in yaml.safe_load_all(text):
        for error in jsonschema.Draft202012Validator(kinds[each["kind"]]).iter_errors(each):
            yield f"{each['kind']} {error.json_path}: {error.message}"


def _strict(schema: Any) -> Any:
    """The schema without room for unknown fields where it names some."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        strict.setdefault("additionalProperties", False)
    return strict


def main(words: list[str]) -> int:
    """Print the problems; return 1 if there are any."""
    if len(words) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    kinds = schemas([Path(word) for word in words[:2]])
    found = [f"{file}: {each}" for file in words[2:] for each in problems(kinds, Path(file).read_text())]
    print("\n".join(found) or f"{len(words) - 2} files are what LLMKube defines")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
