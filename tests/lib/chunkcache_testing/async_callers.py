"""Callers of an `AsyncLLM`."""

import asyncio
from typing import Any

from chunkcache.engine import AsyncLLM


async def last_of(outputs: Any) -> Any:
    """Return the last of the outputs that come, None if none does."""
    last = None
    async for output in outputs:
        last = output
    return last


def run_scenario(model: Any, scenario: Any, **options: Any) -> Any:
    """Return what ``await scenario(llm)`` does; the accounts of ``llm`` are square after it."""

    async def main() -> Any:
        async with AsyncLLM(model, chunk_size=16, **options) as llm:
            result = await scenario(llm)
            await llm.check_accounts()
            return result

    return asyncio.run(main())
