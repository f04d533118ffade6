"""A budget gives its units in the order of asking, and loses none."""

from __future__ import annotations

import asyncio

import pytest

from fastdeploy.core.errors import ServerBusy
from fastdeploy.http.guards.budget import Budget


def test_a_caller_waits_behind_earlier_ones_until_enough_is_free():
    async def main() -> None:
        budget, done = Budget(10, 60.0, "units"), []

        async def use(name: str, units: int) -> None:
            taken = await budget.acquire(units)
            done.append(name)
            await asyncio.sleep(0)
            budget.release(taken)

        first = await budget.acquire(8)
        tasks = [asyncio.create_task(use(name, units)) for name, units in (("large", 9), ("small", 1), ("all", 99))]
        await asyncio.sleep(0)
        assert done == [], "a small request does not overtake a large one"
        budget.release(first)
        await asyncio.gather(*tasks)
        assert done == ["large", "small", "all"]
        assert await budget.acquire(10) == 10, "all units are free again"

    asyncio.run(main())


def test_a_caller_that_waits_too_long_gets_an_error_and_waits_no_more():
    async def main() -> None:
        budget = Budget(1, 0.01, "units")
        async with budget.hold():
            with pytest.raises(ServerBusy, match="units"):
                await budget.acquire(1)
        async with budget.hold():
            pass

    asyncio.run(main())


@pytest.mark.parametrize("granted", [False, True])
def test_a_caller_that_is_cancelled_takes_no_units(granted):
    async def main() -> None:
        budget = Budget(1, 60.0, "units")
        taken = await budget.acquire(1)
        waiting = asyncio.create_task(budget.acquire(1))
        behind = asyncio.create_task(budget.acquire(1))
        await asyncio.sleep(0)
        if granted:
            budget.release(taken)  # the caller gets its unit, and is cancelled before it runs
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        if not granted:
            budget.release(taken)
        assert await behind == 1

    asyncio.run(main())
