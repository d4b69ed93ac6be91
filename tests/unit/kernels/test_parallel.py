"""Units of a loop shared among threads, and what becomes of a thread that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dlrm_kernels.parallel import finish, share, take


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Have one helper."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


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


def test_what_a_helper_raises_is_raised_where_the_loop_was_shared_and_the_next_loop_is_done() -> None:
    outcome: list[BaseException | int] = []

    def training() -> None:
        this = threading.current_thread()
        for _ in range(2):  # the helper lives on, so it fails again
            try:
                share(_fail_beside(this, threading.Event()), 8)
            except MemoryError as error:
                outcome.append(error)
        done: list[int] = []

        def count(counts: Any, units: int) -> None:
            while (unit := take(counts)) < units:
                done.append(unit)
                finish(counts)

        share(count, 8)
        outcome.append(len(done))

    thread = threading.Thread(target=training, daemon=True)
    thread.start()
    thread.join(60)
    assert [str(each) for each in outcome] == ["no memory for a unit"] * 2 + ["8"]
