"""A file of a model with its plan: the properties that all tables of files share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fitter.parameters.table import USEFUL_CONTEXT

if TYPE_CHECKING:
    from fitter.planning.plan.plan import Plan


class Planned:
    """A file, and its plan if there is one."""

    if TYPE_CHECKING:
        plan: Plan | None
        longest_context: int | None
        problem: str | None
        bits_per_weight: float | None

    @property
    def fits(self) -> bool:
        """Whether there is a plan that fits."""
        return self.plan is not None and self.plan.fits

    @property
    def n_ctx(self) -> int | None:
        """Context of the plan, in tokens; ``None`` if it does not fit."""
        return None if self.plan is None or not self.fits else self.plan.params.n_ctx or self.plan.breakdown.n_ctx

    @property
    def least_context(self) -> int:
        """Tokens of context that the best plan has: none where the user set the context or the smallest one."""
        keywords = {} if self.plan is None else self.plan.fit_keywords
        return 0 if {"n_ctx", "fit_ctx"}.intersection(keywords) else USEFUL_CONTEXT

    @property
    def host_weights(self) -> int | None:
        """Bytes of weights in host memory, where llama.cpp always has the token embedding; ``None`` without a plan."""
        return None if self.plan is None else self.plan.host.model

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Estimated speed of prompts; ``None`` if it does not fit."""
        price = None if self.plan is None else self.plan.estimate
        return None if price is None else price.prompt_tokens_per_second

    @property
    def generation_tokens_per_second(self) -> float | None:
        """Estimated speed of generation, or of a model that only reads, of its inputs; ``None`` if it does not fit."""
        price = None if self.plan is None else self.plan.estimate
        return None if price is None else price.tokens_per_second

    @property
    def is_on_devices(self) -> bool:
        """Whether it fits with every layer on devices."""
        plan = self.plan
        if plan is None or not plan.fits or not plan.breakdown.devices:
            return False
        layers, device_types = (
            plan.params.n_gpu_layers,
            {row.buffer_type for row in plan.breakdown.rows if not row.is_host},
        )
        is_whole = layers < 0 or layers > plan.n_layer
        return is_whole and all(each.buffer_type in device_types for each in plan.params.tensor_buft_overrides)
