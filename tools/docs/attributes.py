"""What is said of the fields and properties of a class: the text beneath a field, a property's docstring."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints


@functools.cache
def documented(kind: type) -> dict[str, str]:
    """The docstring of every field and property of ``kind``, its bases included; fields first."""
    found: dict[str, str] = {}
    properties: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        if not base.__module__.startswith("fitter"):
            continue
        [node] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for at, statement in enumerate(node.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                after = node.body[at + 1] if at + 1 < len(node.body) else None
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                found[statement.target.id] = str(text)
            elif isinstance(statement, ast.FunctionDef) and _is_property(statement):
                properties[statement.name] = ast.get_docstring(statement) or ""
    return found | properties


def _is_property(function: ast.FunctionDef) -> bool:
    names = {ast.unparse(each).rpartition(".")[2] for each in function.decorator_list}
    return bool(names & {"property", "cached_property"}) and not function.name.startswith("_")


def hints_of(kind: type) -> dict[str, Any]:
    """The type of every field and property of ``kind``."""
    found = dict(get_type_hints(kind))
    for name in documented(kind):
        member = inspect.getattr_static(kind, name, None)
        if isinstance(member, (property, functools.cached_property)):
            function = member.fget if isinstance(member, property) else member.func
            found[name] = get_type_hints(function)["return"]
    return found


def default(kind: type, name: str) -> str | None:
    """The default of a field as Python has it; ``None`` if it has none, or is no field."""
    found: dict[str, Field[Any]] = {each.name: each for each in fields(kind)} if is_dataclass(kind) else {}
    each = found.get(name)
    if each is None:
        return None
    if each.default is not MISSING:
        return repr(each.default)
    return None if each.default_factory is MISSING else f"{getattr(each.default_factory, '__name__', '')}()"
