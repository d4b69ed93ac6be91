"""Run kernels on several threads, some of which fail."""

from __future__ import annotations

import threading
from typing import Any

from dlrm_kernels.parallel import finish, parallel_for, take


def _fail_in_helper(caller: threading.Thread, failing: threading.Event) -> Any:
    """Return a loop that raises in a helper which took a unit; the caller waits for that."""

    def loop(counts: Any, units: int) -> None:
        if threading.current_thread() is caller:
            assert failing.wait(30)
        while take(counts) < units:
            if threading.current_thread() is not caller:
                failing.set()
                raise MemoryError("no memory for a unit")
            finish(counts)

    return loop


def test_error_of_a_helper_reaches_the_caller_and_the_pool_survives() -> None:
    outcome: list[BaseException | int] = []

    def training() -> None:
        this = threading.current_thread()
        for _ in range(2):  # the same helper fails again
            try:
                parallel_for(_fail_in_helper(this, threading.Event()), 8, 2)
            except MemoryError as error:
                outcome.append(error)
        done: list[int] = []

        def count(counts: Any, units: int) -> None:
            while (unit := take(counts)) < units:
                done.append(unit)
                finish(counts)

        parallel_for(count, 8, 2)
        outcome.append(len(done))

    thread = threading.Thread(target=training, daemon=True)
    thread.start()
    thread.join(60)
    assert [str(each) for each in outcome] == ["no memory for a unit"] * 2 + ["8"]
