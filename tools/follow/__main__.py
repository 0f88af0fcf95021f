"""Say what differs between a build of llama.cpp and the newest known one: ``python -m tools.follow WHAT``.

WHAT is a directory or an archive with llama.cpp's source, its headers or its libraries, or ``PACKAGE==VERSION`` of the
package index. ``--rules`` draws loads and compares fitter's rules with the backends of its source, compiled without
their cards; it needs libraries, in WHAT or named with ``--library``. ``--write`` makes the build known. The exit status
is 1 if something differs, or if fitter cannot use the build.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fitter.errors import FitterError
from fitter.llama.build import layouts
from fitter.llama.build.inspect_build import check_build
from tools.follow import entries, facts, rules
from tools.follow.facts import Facts
from tools.follow.subject import FollowError, Subject, subject_of


def main(argv: list[str] | None = None) -> int:
    """Follow a build, and print what differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.follow", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", metavar="WHAT", help="a directory, an archive, or PACKAGE==VERSION")
    parser.add_argument("--library", type=Path, help="where its libraries are, if not in WHAT")
    parser.add_argument("--name", default="", help="llama.cpp's name for the build (default: the number in WHAT)")
    parser.add_argument("--rules", type=int, default=0, metavar="N", help="compare each profile by N drawn loads")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once for --rules (2)")
    parser.add_argument("--write", action="store_true", help="write the entries that make the build known")
    options = parser.parse_args(argv)
    try:
        return _follow(subject_of(options.what, options.library, options.name), options)
    except (FitterError, FollowError, OSError, ValueError) as error:
        print(f"follow: {error}", file=sys.stderr)
        return 2


def _follow(subject: Subject, options: argparse.Namespace) -> int:
    told = _read(subject)
    print(f"{subject.name}: {_parts_of(subject)}")
    n_differences = _print_differences(told)
    report = check_build(str(subject.library)) if subject.library else None
    if report is not None:
        print(f"\nchecks: {report.problem or ', '.join(report.checks)}")
        if not report.problem:
            print(f"  ggml {report.ggml}, layout {report.layout}")
    status = int(n_differences > 0 or bool(report and report.problem))
    if options.rules:
        print("\nrules")
        with tempfile.TemporaryDirectory(prefix="fitter-") as directory:
            compared = rules.compare(subject, options.rules, options.jobs, Path(directory), keep=options.write)
            status |= _print_all(compared)
    if options.write:
        print("\nwritten")
        layout = dict(layouts.read_header(str(subject.header))) if subject.header else None
        _print_all(entries.write(subject, report.ggml if report else "", told, layout))
    return status


def _read(subject: Subject) -> Facts:
    every = []
    if subject.header is not None:
        every.append(facts.read_header(subject.header))
    if subject.source is not None:
        every.append(facts.read_source(subject.source))
    if subject.library is not None:
        every.append(facts.read_library(str(subject.library)))
    return facts.parts_of(every)


def _parts_of(subject: Subject) -> str:
    parts = {"source": subject.source, "header": subject.header, "libraries": subject.library}
    found = ", ".join(f"{name} ({os.path.relpath(path, subject.root)})" for name, path in parts.items() if path)
    return f"{found} of {subject.root.name}"


def _print_differences(told: Facts) -> int:
    count = 0
    for part, (build, before) in facts.known().items():
        if part not in told:
            print(f"\n{part}: not told; known from {build}")
            continue
        lines = list(facts.differences(before, told[part]))
        count += len(lines)
        where = f", see {facts.WHERE[part]}" if lines else ""
        print(f"\n{part}: {len(lines)} of {len(told[part])} differ from {build}{where}")
        for line in lines:
            print(f"  {line}")
    return count


def _print_all(lines: Iterable[str]) -> int:
    """Print lines, and return whether one begins with ``differs``."""
    differs = False
    for line in lines:
        differs |= line.startswith("differs")
        print(f"  {line}", flush=True)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
