"""Make plans with one build of llama.cpp, on any system: ``plans.py BUILD JOBS ANSWERS``. Needs nothing but fitter.

``JOBS`` is JSON: a list of the keywords of ``fitter.fit``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import fitter


def answer(build: str, job: dict[str, Any]) -> Any:
    """The plan that ``fitter`` prints as JSON, without its search and paths; a refusal is its text."""
    try:
        plan = fitter.fit(llama_cpp=build, **job)
    except fitter.FitterError as error:
        return f"{type(error).__name__} {error}".replace(job["model"], "")
    said = plan.to_dict()
    # what is asked in advance depends on who is quicker
    del said["search"]
    said["llama_cpp"] = said["llama_cpp"]["version"]
    text = json.dumps([plan.arguments() if plan.fits else None, said])
    return json.loads(text.replace(json.dumps(job["model"]), "0"))


def main(build: str, jobs: str, result: str) -> None:
    """Write the answers to the jobs as JSON, and say how long each took on stderr."""
    with open(jobs, encoding="utf-8") as file:
        asked = json.load(file)
    answers = []
    for job in asked:
        start = time.monotonic()
        answers.append(answer(build, job))
        words = {name: value for name, value in job.items() if name != "model"}
        print(f"{time.monotonic() - start:5.1f} s {job['model']} {words}", file=sys.stderr, flush=True)
    with open(result, "w", encoding="utf-8") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
