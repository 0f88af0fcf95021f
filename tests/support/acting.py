"""Tests in an event loop that ends, with something that acts what the loop's code asks."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

SECONDS = 120.0


def acting(make: Callable[[], Any]) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run a test with what ``make`` returns as its first value, then close that; rows and fixtures come after it."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def whole(**more: Any) -> None:
            acted = make()
            try:
                await test(acted, **more)
            finally:
                await acted.close()

        def run(**more: Any) -> None:
            asyncio.run(asyncio.wait_for(whole(**more), SECONDS))

        run.__signature__ = inspect.Signature([*inspect.signature(test).parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.005)
