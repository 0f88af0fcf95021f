"""Write a plan as a Python script that loads the model."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from fitter.errors import PlanError
from fitter.model.location import local_name
from fitter.output.keywords import fit_kwargs, llama_kwargs
from fitter.planning.plan.plan import Plan


def python_text(plan: Plan) -> str:
    """Write a script that loads the model into ``llm``.

    It calls ``llama_cpp.Llama`` if that has all the parameters. Otherwise, and beside a draft model or a projector, it
    calls ``fitter.fit`` with every parameter fixed, which measures them again on the machine that runs the script, and
    then ``plan.load()``.
    """
    path = os.path.abspath(local_name(plan.model.path))
    if not any(use.arguments for use in plan.shared if use.kind != "lora"):
        # Llama may have no parameter for something in the plan
        with suppress(PlanError):
            return _script("import llama_cpp", "llm = llama_cpp.Llama", path, llama_kwargs(plan, anyway=True))
    return _script("import fitter", "plan = fitter.fit", path, fit_kwargs(plan)) + "\nllm = plan.load()"


def _script(imports: str, call: str, path: str, kwargs: dict[str, Any]) -> str:
    words = [_literal(path), *(f"{name}={_literal(value)}" for name, value in kwargs.items())]
    return "\n".join([imports, "", f"{call}(", *(f"    {word}," for word in words), ")"])


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str) and value.isprintable():
        # a JSON string is a Python string in double quotes
        return json.dumps(value, ensure_ascii=False)
    return ascii(value)
