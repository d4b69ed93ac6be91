"""Repeats of calls that a store could not take: backoff with full jitter, under one budget for all calls.

Many threads call one store. While it is down, each would repeat by itself, and the store, once back, would meet
several times the usual load. So a repeat costs a token, which only calls that worked give back: in an outage the
tokens are soon gone, and each call is made once until the store answers again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
MOST_TRIES = 6
LONGEST_RUN_S = 60.0
"""No repeat begins later: a store that hangs holds nobody up for as many timeouts as there are tries."""
TOKENS = 100.0
GIVEN_BACK = 0.2
"""Tokens for a call that worked: in the long run at most one call of six is a repeat."""

Reason = Literal["throttled", "failed", "broken", "credentials"]
"""Why a call is repeated: the store asked for fewer calls, could not answer, or the answer did not come whole; or
there are no credentials yet to call it with."""
OnRepeat = Callable[[Reason], object]
R = TypeVar("R")


def count_nothing(reason: Reason) -> None:
    """For stores whose repeats nobody counts."""


class Repeats:
    """Makes the calls of one store, from any thread.

    Args:
        reason_of: why a call that raised this is worth another try; None: it is not.
        on_repeat: told of each repeat before its pause.
        sleep, clock: how time passes (seconds).
        draw: the source of numbers in [0, 1).
    """

    def __init__(
        self,
        reason_of: Callable[[Exception], Reason | None],
        on_repeat: OnRepeat = count_nothing,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._reason_of, self._on_repeat = reason_of, on_repeat
        self._sleep, self._clock, self._draw = sleep, clock, draw
        self._lock = threading.Lock()
        self._tokens = TOKENS

    def run(self, call: Callable[[], R]) -> R:
        """The call's result; what its last try raised, where tries, time or tokens ran out or none would help."""
        pause, until = FIRST_PAUSE_S, self._clock() + LONGEST_RUN_S
        for tries_left in reversed(range(MOST_TRIES)):
            try:
                result = call()
            except Exception as error:
                reason = self._reason_of(error)
                if reason is None or not tries_left or self._clock() >= until or not self._take():
                    raise
                self._on_repeat(reason)
                if reason == "credentials":
                    pause = LONGEST_PAUSE_S  # what hands them out, on a node that has just come up, is late by seconds
                self._sleep(self._draw() * pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
            else:
                break
        self._give_back()
        return result

    def _take(self) -> bool:
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def _give_back(self) -> None:
        with self._lock:
            self._tokens = min(TOKENS, self._tokens + GIVEN_BACK)
