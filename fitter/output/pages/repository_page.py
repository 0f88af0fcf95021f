"""The models of a repository with their plans, as a part of a page. Untrusted names of files are escaped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fitter.output.pages.page import fragment
from fitter.output.pages.report_page import Fact, command_entry
from fitter.output.tables.repository_table import lines_below
from fitter.text import human, speed

if TYPE_CHECKING:
    from fitter.planning.tables.file_rows import Repository, RepositoryFile

_FITS = {True: "yes", False: "no", None: "unknown"}


def repository_panel(repository: Repository, name: str, of: str, say: Callable[[str], str] = str) -> str:
    """Draw the table of ``repository``: HTML without style and script. A button for each plan has the model's address.

    Args:
        repository: The models with their plans.
        name: Beginning of its ids, unique on the page.
        of: The table's name among those of the page.
        say: Words a message for the page.

    Raises:
        LibraryError: A package is missing.
    """
    best = repository.best
    fitting = sum(each.fits for each in repository.found)
    return fragment(
        "repository.html",
        prefix=f"{name}-",
        of=f", {of}",
        below="h3",
        fits=repository.fits,
        verdict=f"{fitting} of {len(repository.found)} models {'fits' if fitting == 1 else 'fit'}",
        title=repository.address,
        command=None if best is None or best.plan is None else command_entry(best.plan),
        facts=[] if best is None else _facts(best),
        rows=[_row(each, is_best=each is best) for each in repository.found],
        notes=list(map(say, lines_below(repository))),
    )


def _facts(best: RepositoryFile) -> list[Fact]:
    rates = ((best.generation_tokens_per_second, "generation"), (best.prompt_tokens_per_second, "prompt"))
    facts = [Fact("best", best.file_type or best.name, human(best.bytes)), Fact("context", f"{best.n_ctx:,}", "tokens")]
    return facts + [Fact(name, speed(rate), "tokens/s, estimated") for rate, name in rates if rate is not None]


def _row(each: RepositoryFile, *, is_best: bool) -> dict[str, Any]:
    """Write a model's figures; ``-`` for each that it does not have."""
    figures = {
        "size": human(each.bytes),
        "fits": _FITS[each.fits if each.plan is not None else None],
        "bits per weight": each.bits_per_weight and f"{each.bits_per_weight:.2f}",
        "context": each.n_ctx and f"{each.n_ctx:,}",
        "longest context": each.longest_context and f"{each.longest_context:,}",
        "weights on the host": human(each.plan.host.model) if each.plan is not None and each.fits else None,
        "generation, tokens/s": each.generation_tokens_per_second and speed(each.generation_tokens_per_second),
        "prompt, tokens/s": each.prompt_tokens_per_second and speed(each.prompt_tokens_per_second),
    }
    return {
        "name": each.name,
        "model": each.path,
        "has_plan": each.plan is not None,
        "is_best": is_best,
        "figures": [(title, text or "-") for title, text in figures.items()],
    }


__all__ = ["repository_panel"]
