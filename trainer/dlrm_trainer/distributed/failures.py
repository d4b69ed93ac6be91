"""Find the ranks that died, hang or slow the others down, so that all ranks name the same ones.

A rank whose main thread hangs still answers, from a thread that does nothing else; a dead or stopped one does not.
Everything passes through rank 0's store, on a connection of its own, so that no other call can hold it up.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from dlrm_api.names import ExitCode
from dlrm_api.progress import SlowestRank
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.gang_store import GangStore

POLL_S = 0.5
"""How often every rank looks whether one was missed."""
ANSWERS_S = 2.0
"""How long an answer is waited for; no answer is one too."""
STORE_S = 2.0
"""How long rank 0's store may take beyond that before rank 0 itself counts as lost."""
LEAVE_S = 10.0
"""A rank that still runs so long after it heard who was missed is stuck, and ends itself."""
ALARM, VERDICT = "alarm", "verdict"
ANSWERS, LEFT, HEARD = "answers", "left", "heard"
"""What ranks say, a line each and all in one place: hundreds of them are read by one request, not by one for each."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Where a rank is."""

    made: int
    """Collectives that it began."""
    still_s: float
    """Seconds since the last of them."""


class RollCall:
    """One rank's part in it, from a thread of its own until it is closed.

    Args:
        store: on a connection that nobody else uses.
        rank: of this process.
        world_size: number of ranks.
        made: collectives that this rank began so far, in all groups.
        timeout_s: of collectives.
    """

    def __init__(self, store: GangStore, rank: int, world_size: int, made: Callable[[], int], timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._made = store, rank, world_size, made
        self._timeout_s = timeout_s
        self._verdict = ""
        self._last, self._since = made(), time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="dlrm-roll-call", daemon=True).start()

    def close(self, last_words: str) -> None:
        """Answer no more; words say why this rank ends where nobody else is to blame, and are empty otherwise."""
        self._closed.set()
        if last_words:
            self._in_time(lambda: self._say(LEFT, last_words))

    def who_is_missed(self) -> str:
        """The ranks to blame for a failed collective, in words; the same on every rank."""
        if not self._verdict:
            self._in_time(self._agree)
        if not self._verdict:
            return f"{name_ranks([0])} died or fell silent"
        self._in_time(self._let_others_hear)
        return self._verdict

    def _in_time(self, call: Callable[[], object]) -> None:
        """Talk to the store for as long as an answer is waited for: it says nothing where its process is stopped."""

        def talk() -> None:
            with contextlib.suppress(RuntimeError):
                call()

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        thread.join(ANSWERS_S + STORE_S)

    def _agree(self) -> None:
        self._store.set(ALARM, "1")
        self._answer()
        verdict = _verdict(*self._ask(), self._rank, self._timeout_s)
        self._verdict = self._store.set_first(VERDICT, verdict) or verdict

    def _answer(self) -> None:
        self._say(ANSWERS, asdict(Answer(made=self._last, still_s=time.monotonic() - self._since)))

    def _ask(self) -> tuple[Mapping[int, Answer], Mapping[int, str], Sequence[int]]:
        """Where ranks are that answer, last words of those that ended, and who says nothing."""
        deadline = time.monotonic() + ANSWERS_S
        while True:
            answers, words = self._said(ANSWERS), self._said(LEFT)
            silent = [rank for rank in range(self._world_size) if rank not in answers and rank not in words]
            if not silent or time.monotonic() >= deadline:
                return {rank: Answer(**body) for rank, body in answers.items()}, words, silent
            time.sleep(POLL_S / 20)

    def _let_others_hear(self) -> None:
        """Stay, with the store if it is here, until all who answered know the verdict."""
        deadline = time.monotonic() + ANSWERS_S
        waiting = self._said(ANSWERS).keys()
        while waiting - self._said(HEARD).keys() - self._said(LEFT).keys() and time.monotonic() < deadline:
            time.sleep(POLL_S / 20)

    def _listen(self) -> None:
        answered = heard = False
        while not heard and not self._closed.wait(POLL_S):
            if self._made() != self._last:
                self._last, self._since = self._made(), time.monotonic()
            with contextlib.suppress(RuntimeError):  # rank 0 is gone: the next collective will say so
                if not answered and self._store.has([ALARM]):
                    self._answer()
                    answered = True
                if answered and (verdict := self._store.get(VERDICT)):
                    self._verdict = verdict
                    self._say(HEARD, True)
                    heard = True
        if not self._closed.wait(LEAVE_S):
            faulthandler.dump_traceback()
            os._exit(ExitCode.TEMPORARY)

    def _say(self, where: str, what: object) -> None:
        self._store.append(where, json.dumps([self._rank, what]))

    def _said(self, where: str) -> dict[int, Any]:
        """What each rank said there last."""
        return dict(map(json.loads, self._store.words(where)))


def _verdict(
    answers: Mapping[int, Answer], words: Mapping[int, str], silent: Sequence[int], asking: int, timeout_s: float
) -> str:
    """Who ended comes before who is silent, and that before who hangs: the later ones may be consequences."""
    if words:
        rank = min(words)
        return f"rank {rank} ended: {words[rank]}"
    if silent:
        return f"{name_ranks(silent)} died or fell silent"
    first = max(each.made for each in answers.values())
    last = min(each.made for each in answers.values())
    if first == last or answers[asking].still_s < timeout_s / 2:
        return "the connection between ranks broke"
    behind = [rank for rank, each in answers.items() if each.made == last]
    still_s = max(answers[rank].still_s for rank in behind)
    return (
        f"{name_ranks(behind)} hung: alive, but in no collective for {still_s:.0f} s and {first - last} behind: "
        "see the stacks in the log"
    )


def name_ranks(numbers: Sequence[int]) -> str:
    """Ranks in words, the first few of many."""
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


T = TypeVar("T")
WORD_S = 20.0
"""Who is at work says so at least so often: no wait for it comes near the timeout of collectives."""


class InStep:
    """One rank's share of work that all ranks have, some none of it, between two other collectives.

    Each rank calls ``at_work`` as often as it likes, and at its end ``wait``, which returns when all are done.

    Args:
        collectives: of all ranks.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self._last = collectives, time.monotonic()

    def at_work(self) -> None:
        """Say that this rank has not ended yet, where it is time to.

        Raises:
            PeerLostError: a rank is gone.
        """
        if time.monotonic() - self._last >= WORD_S:
            self._working(1)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Some items, at work before each."""
        for item in items:
            self.at_work()
            yield item

    def wait(self) -> None:
        """Wait until every rank is here, however long that takes.

        Raises:
            PeerLostError: a rank is gone.
        """
        while self._working(0):
            pass

    def _working(self, mine: int) -> int:
        """Ranks that are at work."""
        count = torch.tensor([mine])
        self._collectives.all_reduce(count)
        self._last = time.monotonic()
        return int(count)


WINDOW = 32
"""Steps from one round to the next: one small collective in so many steps, made where all ranks have just met."""
WARM_UP = 4
"""The first steps of an attempt compile and fill caches: they do not count."""


class Pace:
    """One rank's part. Every rank must call it at the same steps.

    Args:
        collectives: of all ranks.
        own_seconds: time so far that this rank spent on its own part of steps.
    """

    def __init__(self, collectives: Collectives, own_seconds: Callable[[], float]) -> None:
        self._collectives, self._own_seconds = collectives, own_seconds
        self._steps = 0
        self._mark = (0, 0.0)

    def stepped(self, step: int) -> SlowestRank | None:
        """The slowest rank of the window that ends with ``step``; None where none ends, or there is but one rank."""
        if self._collectives.world_size == 1:
            return None
        self._steps += 1
        if self._steps <= WARM_UP:
            self._mark = step, self._own_seconds()
            return None
        if step % WINDOW:
            return None
        (first, since), self._mark = self._mark, (step, self._own_seconds())
        mean = (self._mark[1] - since) / (step - first)
        every = self._collectives.all_gather(torch.tensor([mean], dtype=torch.float64))
        return slowest(every.flatten().tolist())


def slowest(seconds: Sequence[float]) -> SlowestRank:
    """The rank with the longest time beside the median of the others'; the first of equal ones.

    Args:
        seconds: of each rank, at least two.
    """
    rank = max(range(len(seconds)), key=lambda each: (seconds[each], -each))
    others = [each for number, each in enumerate(seconds) if number != rank]
    return SlowestRank(rank=rank, seconds=seconds[rank], median_seconds=statistics.median(others))
