"""Runs the Python blocks of one page in one namespace, and puts what they print into them.

The runner of pages starts it in the page's folder. Each line on stdin is a JSON object with the block's ``source``;
each line on stdout is the answer: ``source`` with what was printed in its comments, or ``error``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from pytest_examples.config import ExamplesConfig
from pytest_examples.find_examples import CodeExample
from pytest_examples.run_code import run_code

_CONFIG = ExamplesConfig(line_length=100, quotes="double", target_version="py310")


def run(source: str, name: str, namespace: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """Run a block; returns it with what it prints, and the namespace after it. Raises what the block raises."""
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    example = CodeExample.create(source, path=path.with_suffix(".md"))
    printed, after = run_code(
        example=example,
        python_file=path,
        loader=None,
        config=_CONFIG,
        enable_print_mock=True,
        print_callback=None,
        include_print=None,
        module_globals=namespace,
        call=None,
    )
    return printed.updated_print_statements(example) or source, after


def main() -> None:
    """Answer every line of stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What llama.cpp writes there is no answer.
    os.dup2(2, 1)
    namespace: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, line in enumerate(sys.stdin, 1):
            try:
                source, namespace = run(json.loads(line)["source"], f"block_{number}", namespace, Path(folder))
                answer = {"source": source}
            except BaseException as error:
                answer = {"error": "".join(traceback.format_exception_only(error)).strip()}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
