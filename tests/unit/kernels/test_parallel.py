"""Run kernels on several threads, some of which fail."""

from __future__ import annotations

import threading
from typing import Any

from dlrm_kernels.parallel import finish, parallel_for, take


def _fail_beside(caller: threading.Thread, failing: threading.Event) -> Any:
    """A loop whose helper takes a unit and raises; the caller begins when it has one."""

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
        for _ in range(2):  # the helper lives on, so it fails again
            try:
                parallel_for(_fail_beside(this, threading.Event()), 8, 2)
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
