"""Find the ranks that died, hang or slow the others down, so that all ranks name the same ones.

A rank whose main thread hangs still answers, from a thread that does nothing else; a dead or stopped one does not.
Everything passes through rank 0's store, on a connection of its own, so that no other call can hold it up.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import json
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dlrm_api.names import ExitCode
from dlrm_api.progress import SlowestRank
from dlrm_trainer.distributed.collectives import Collectives

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
"""How often every rank checks whether another one raised the alarm."""
ANSWER_TIMEOUT_S = 2.0
"""How long to wait for an answer; a rank without one counts as lost."""
STORE_TIMEOUT_S = 2.0
"""How long rank 0's store may take on top before rank 0 itself counts as lost."""
CALL_TIMEOUT_S = ANSWER_TIMEOUT_S + STORE_TIMEOUT_S
"""How long a question to all ranks may take."""
DEATH_TIMEOUT_S = 1.0
"""How long a launcher takes to tell that it lost a rank; without that the others notice within a few seconds."""
EXIT_TIMEOUT_S = 10.0
"""A rank that still runs so long after the verdict is stuck, and ends itself."""
ALARM, VERDICT = "alarm", "verdict"
ANSWERS, LEFT, HEARD = "answers", "left", "heard"
"""Keys under which each rank appends a line: one request reads those of hundreds of ranks."""
SIGNATURE_DIGITS = 64
BROKEN = "the connection between ranks broke"


class GangStore:
    """Share keys and values through rank 0's store that nobody can name or forge without the secret.

    Whoever reaches the store's port may list its keys, read them and write others. So each key is a keyed hash of its
    name, and each value carries one of its name and itself: a value that is not signed is ignored. Without a secret,
    anybody can read and write.
    """

    def __init__(self, store: TCPStore, secret: str) -> None:
        self._store, self._secret = store, secret.encode()

    def clone(self) -> GangStore:
        """Return the same store on a connection of its own."""
        line: TCPStore = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
        return GangStore(line, self._secret.decode())

    def without_secret(self) -> GangStore:
        """Return the same store as ranks without a secret see it."""
        return GangStore(self._store, "")

    def for_torch(self, name: str) -> PrefixStore:
        """Return a namespace for torch's keys, which can be listed once the first exists, and are not signed."""
        return PrefixStore(self._key(name), self._store)

    def set(self, name: str, value: str) -> None:
        """Write a value, replacing the one that exists."""
        self._store.set(self._key(name), self._signed(name, value))

    def set_first(self, name: str, value: str) -> str | None:
        """Write a value unless one exists; return the one that exists then, None if not signed by this gang."""
        return self._verified(name, self._store.compare_set(self._key(name), "", self._signed(name, value)))

    def get(self, name: str) -> str | None:
        """Return a value; None if this gang has not written one."""
        return self._verified(name, self._store.get(self._key(name))) if self.has([name]) else None

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all keys exist: one request, however many they are."""
        return bool(self._store.check([self._key(name) for name in names]))

    def append(self, name: str, value: str) -> None:
        """Append a line to a value."""
        self._store.append(self._key(name), self._signed(name, value) + "\n")  # type: ignore[attr-defined]  # as above

    def read_lines(self, name: str) -> list[str]:
        """Return all lines that this gang appended, oldest first, by two requests."""
        lines = self._store.get(self._key(name)).splitlines() if self.has([name]) else []
        return [value for value in (self._verified(name, line) for line in lines) if value is not None]

    def _key(self, name: str) -> str:
        return self._hash(f"key {name}")

    def _signed(self, name: str, value: str) -> str:
        return self._hash(f"word {name} {value}") + value

    def _verified(self, name: str, signed: bytes) -> str | None:
        text = signed.decode(errors="replace")
        value = text[SIGNATURE_DIGITS:]
        return value if hmac.compare_digest(text.encode(), self._signed(name, value).encode()) else None

    def _hash(self, what: str) -> str:
        return hmac.digest(self._secret, what.encode(), "sha256").hex()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Hold how far a rank has got."""

    made: int
    """Collectives that it has begun."""
    still_s: float
    """Seconds since the last of them."""


class FailureDetector:
    """Agree with all ranks on which of them are lost, from a thread of its own until it is closed.

    A rank that lost a peer raises the alarm; all ranks then report how far they have got, and the first verdict counts.
    Nobody else uses the store's connection; ``made`` returns the collectives that this rank has begun, in all groups,
    and ``timeout_s`` is theirs. ``overdue_s`` returns for how long its GPU has waited for one: the host may wait for
    the GPU then, so this thread raises the alarm.
    """

    def __init__(
        self,
        store: GangStore,
        rank: int,
        world_size: int,
        made: Callable[[], int],
        timeout_s: float,
        overdue_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._store, self._rank, self._world_size, self._made = store, rank, world_size, made
        self._timeout_s, self._overdue_s = timeout_s, overdue_s
        self._verdict = ""
        self._last, self._since = made(), time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="dlrm-roll-call", daemon=True).start()

    def close(self, reason: str) -> None:
        """Stop answering. ``reason`` says why this rank ends; empty if it is not to blame or all is well."""
        self._closed.set()
        if reason:
            _within_timeout(lambda: _append(self._store, LEFT, self._rank, reason), CALL_TIMEOUT_S)

    def verdict(self) -> str:
        """Return which ranks are lost, as far as this rank has heard; empty if it has heard of none."""
        return self._verdict

    def explain(self) -> str:
        """Return which ranks made a collective fail, as a message that is the same on every rank."""
        if not self._verdict:
            _within_timeout(self._agree, CALL_TIMEOUT_S)
        if not self._verdict:
            return BROKEN if self._rank == 0 else f"{name_ranks([0])} died or stopped responding"
        _within_timeout(self._wait_for_others, CALL_TIMEOUT_S)
        return self._verdict

    def _agree(self) -> None:
        self._store.set(ALARM, "1")
        self._answer()
        verdict = _verdict(*self._ask(), self._rank, self._timeout_s)
        self._verdict = self._store.set_first(VERDICT, verdict) or verdict

    def _answer(self) -> None:
        _append(
            self._store, ANSWERS, self._rank, asdict(Answer(made=self._last, still_s=time.monotonic() - self._since))
        )

    def _ask(self) -> tuple[Mapping[int, Answer], Mapping[int, str], Sequence[int]]:
        """Return the answers, the reasons of ranks that ended, and the ranks that do not respond."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            answers, reasons = self._read(ANSWERS), self._read(LEFT)
            silent = [rank for rank in range(self._world_size) if rank not in answers and rank not in reasons]
            if not silent or time.monotonic() >= deadline:
                return {rank: Answer(**body) for rank, body in answers.items()}, reasons, silent
            time.sleep(POLL_INTERVAL_S / 20)

    def _wait_for_others(self) -> None:
        """Wait until all ranks that answered know the verdict: rank 0's store ends with its process."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        waiting = self._read(ANSWERS).keys() - {self._rank}
        while waiting - self._read(HEARD).keys() - self._read(LEFT).keys() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S / 20)

    def _listen(self) -> None:
        answered = heard = False
        while not heard and not self._closed.wait(POLL_INTERVAL_S):
            if self._made() != self._last:
                self._last, self._since = self._made(), time.monotonic()
            # Without rank 0 the next collective fails and says so.
            with contextlib.suppress(RuntimeError):
                if not answered and self._overdue_s() > self._timeout_s:
                    self._agree()
                    answered = True
                if not answered and self._store.has([ALARM]):
                    self._answer()
                    answered = True
                if answered and (verdict := self._store.get(VERDICT)):
                    self._verdict = verdict
                    _append(self._store, HEARD, self._rank, True)
                    heard = True
        if not self._closed.wait(EXIT_TIMEOUT_S):
            logger.error("this rank is stuck after another was lost", extra={"reason": self._verdict})
            faulthandler.dump_traceback()
            os._exit(ExitCode.TEMPORARY)

    def _read(self, where: str) -> dict[int, Any]:
        """Return each rank's last line."""
        return dict(map(json.loads, self._store.read_lines(where)))


def report_death(reach: Callable[[], GangStore], rank: int, signal_name: str) -> None:
    """Tell all ranks which signal killed one, from its launcher: they would wait for its answer."""
    told = threading.Event()

    def tell() -> None:
        _append(reach(), LEFT, rank, f"killed by {signal_name}")
        told.set()

    # A busy rank 0 may refuse a connection.
    deadline = time.monotonic() + DEATH_TIMEOUT_S
    while not told.is_set() and (left_s := deadline - time.monotonic()) > 0:
        _within_timeout(tell, left_s)
        told.wait(POLL_INTERVAL_S / 20)


def _append(store: GangStore, where: str, rank: int, what: object) -> None:
    store.append(where, json.dumps([rank, what]))


def _within_timeout(call: Callable[[], object], timeout_s: float) -> None:
    """Call the store in a thread: it does not answer at all if its process is stopped, or gone."""

    def run() -> None:
        with contextlib.suppress(OSError, ExceptionGroup, RuntimeError):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)


def _verdict(
    answers: Mapping[int, Answer], reasons: Mapping[int, str], silent: Sequence[int], asking: int, timeout_s: float
) -> str:
    """Blame ended ranks first, then silent ones, then hung ones: the latter may be consequences."""
    if reasons:
        rank = min(reasons)
        return f"rank {rank} ended: {reasons[rank]}"
    if silent:
        return f"{name_ranks(silent)} died or stopped responding"
    first = max(each.made for each in answers.values())
    last = min(each.made for each in answers.values())
    if first == last or answers[asking].still_s < timeout_s / 2:
        return BROKEN
    behind = [rank for rank, each in answers.items() if each.made == last]
    still_s = max(answers[rank].still_s for rank in behind)
    return (
        f"{name_ranks(behind)} hung: no collective for {still_s:.0f} s, and {first - last} behind the others; see the "
        "stacks in the log"
    )


def name_ranks(numbers: Sequence[int]) -> str:
    """Return ranks as text, the first few of many."""
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


T = TypeVar("T")
KEEPALIVE_INTERVAL_S = 20.0
"""How often a working rank reports that it is alive, so that no wait comes near the timeout of collectives."""


class CollectiveKeepalive:
    """Keep ranks together while some of them work longer than a collective may wait.

    Each rank calls ``keep_alive`` as often as it likes, and at its end ``wait``, which returns when all are done. Both
    raise PeerLostError if a rank is gone.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self._last = collectives, time.monotonic()

    def keep_alive(self) -> None:
        """Tell the others that this rank still works, if it is time to."""
        if time.monotonic() - self._last >= KEEPALIVE_INTERVAL_S:
            self._working(1)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, with a keepalive before each."""
        for item in items:
            self.keep_alive()
            yield item

    def wait(self) -> None:
        """Wait until every rank has called this, however long that takes."""
        while self._working(0):
            pass

    def _working(self, mine: int) -> int:
        """Return the number of ranks that still work."""
        count = torch.tensor([mine])
        self._collectives.all_reduce(count)
        self._last = time.monotonic()
        return int(count)


WINDOW_STEPS = 32
"""Steps of a measurement: one small collective each, at a point where all ranks have just met."""
WARM_UP_STEPS = 4
"""The first steps of an attempt compile and fill caches, and are not measured."""


class StepTimer:
    """Find the rank that the others wait for. Every rank must call it at the same steps.

    ``own_seconds`` returns the time that this rank has spent on its own part of steps.
    """

    def __init__(self, collectives: Collectives, own_seconds: Callable[[], float]) -> None:
        self._collectives, self._own_seconds = collectives, own_seconds
        self._steps = 0
        self._mark = (0, 0.0)

    def stepped(self, step: int) -> SlowestRank | None:
        """Return the slowest rank of the window that ends with ``step``; None without one, or with one rank."""
        if self._collectives.world_size == 1:
            return None
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            self._mark = step, self._own_seconds()
            return None
        if step % WINDOW_STEPS:
            return None
        (first, since), self._mark = self._mark, (step, self._own_seconds())
        mean = (self._mark[1] - since) / (step - first)
        every = self._collectives.all_gather(torch.tensor([mean], dtype=torch.float64))
        return slowest(every.flatten().tolist())


def slowest(seconds: Sequence[float]) -> SlowestRank:
    """Return the first rank of two or more with the longest time, and the median of the others' times."""
    rank = max(range(len(seconds)), key=lambda each: (seconds[each], -each))
    others = [each for number, each in enumerate(seconds) if number != rank]
    return SlowestRank(rank=rank, seconds=seconds[rank], median_seconds=statistics.median(others))
