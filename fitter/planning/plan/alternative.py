"""An alternative to a plan, for words that the user may add. Tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alternative:
    """A plan that other parameters would give. A fit with them may find a faster placement."""

    arguments: tuple[str, ...]
    """The words to add to the call, such as ``-c 65536``; none for another file of the model."""
    n_ctx: int
    """Its context."""
    prompt_tokens_per_second: float
    """Estimated speed of prompt processing."""
    generation_tokens_per_second: float
    """Estimated speed of generation."""
    is_measured: bool
    """Whether a dummy load kept every margin; otherwise its memory is an estimate as well."""
    file_type: str = ""
    """Its file type, if that is another one. The bytes of its weights are an estimate."""
