"""Actors that take turns, and a store in memory that fails them: what happens depends on one seed alone.

Each actor has a thread, and one alone runs at any moment: until it calls the store, or sleeps. Whoever steps the actors
thereby chooses the interleaving, call by call.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from dlrm_api.errors import NoInputError, StoreUnavailableError
from dlrm_stores.base import Body, ObjectInfo

T = TypeVar("T")


class Killed(BaseException):
    """End the actor here."""


class Actor:
    """Work that goes on for one turn at a time."""

    _here = threading.local()

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._dying, self.ended = work, False, False
        self.asleep = False
        """Whether it sleeps, and so has nothing to do."""
        # Locked until the other side gives the turn. A lock passes it on in 26 us, a semaphore in 65 us.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.result: Any = None
        self.error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        Actor._here.actor = self
        self._go.acquire()
        try:
            if not self._dying:
                self.result = self._work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._back.release()

    def step(self) -> None:
        """Let it run until it pauses or ends."""
        if not self.ended:
            self._go.release()
            self._back.acquire()

    def kill(self) -> None:
        """Let it die where it pauses; whatever it still tries to do there fails too."""
        self._dying = True
        while not self.ended:
            self.step()

    @classmethod
    def pause(cls, *, asleep: bool = False) -> None:
        """Give the turn back; nothing outside of actors."""
        actor = getattr(cls._here, "actor", None)
        if actor is None:
            return
        actor.asleep = asleep
        if not actor._dying:
            actor._back.release()
            actor._go.acquire()
        if actor._dying:
            raise Killed


class Clock:
    """Stands in for ``time``: it goes on when an actor sleeps, at least by a second."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def monotonic_ns(self) -> int:
        self.now += 1e-6
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1.0)
        Actor.pause(asleep=True)


class InTurn:
    """Stands in for ``ThreadPoolExecutor``: work is done at once, in the caller's thread."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done

    map = staticmethod(map)


class MemoryStore:
    """Objects in a dictionary, with the times of their writes."""

    uri = "memory:"

    def __init__(self, clock: Clock, *, conditional: bool = True) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.written: dict[str, bytes] = {}
        """Every object that ever was, as it was written last."""
        self._clock, self._conditional = clock, conditional

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NoInputError(f"{key}: there is no such object")
        return self.objects[key][0]

    def get_into(self, key: str, buffer: memoryview) -> int:
        body = self.get(key)
        size = min(len(body), buffer.nbytes)
        buffer.cast("B")[:size] = body[:size]
        return len(body)

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        self.objects[key] = bytes(body), self._clock.now
        self.written[key] = bytes(body)

    def put_if_absent(self, key: str, body: Body) -> bool:
        if self._conditional and key in self.objects:
            return False
        self.put(key, body)
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = sorted((key, *each) for key, each in self.objects.items() if key.startswith(prefix))
        return iter([ObjectInfo(key=key, size=len(body), modified=time) for key, body, time in found])

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def delete_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def size(self, key: str) -> int | None:
        return len(self.objects[key][0]) if key in self.objects else None

    def sweep_uploads(self, older_than_s: float) -> int:
        return 0


class FailingStore:
    """Make each call a turn of the schedule; some get no answer, whether or not they took effect.

    Args:
        store: what is behind it.
        draw: of what fails at random; None: nothing does.
    """

    def __init__(self, store: MemoryStore, draw: random.Random | None = None) -> None:
        self.store, self._draw = store, draw or random.Random(0)
        self.uri = store.uri
        self.share = 0.0
        """Share of calls that fail; some of them begin an outage."""
        self._down = 0
        """Calls until the outage is over."""
        self.calls = 0
        self.before: Callable[[int], None] = lambda number: None
        self.after: Callable[[int], None] = lambda number: None
        """Called with the number of each call, from 0, before and after it takes effect; what they raise, it raises."""

    def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        Actor.pause()
        number, self.calls = self.calls, self.calls + 1
        self.before(number)
        fate = self._draw.random()
        if self.share and (self._down or fate < self.share):
            if not self._down and fate < self.share / 3:  # the answer is what gets lost
                work(*arguments)
            self._down = max(0, self._down - 1) if self._down or fate < self.share * 0.9 else self._draw.randint(1, 30)
            raise StoreUnavailableError("no answer")
        result = work(*arguments)
        self.after(number)
        Actor.pause()
        return result

    def get(self, key: str) -> bytes:
        return self._call(self.store.get, key)

    def get_into(self, key: str, buffer: memoryview) -> int:
        return self._call(self.store.get_into, key, buffer)

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        self._call(self.store.put, key, body, sha256)

    def put_if_absent(self, key: str, body: Body) -> bool:
        return self._call(self.store.put_if_absent, key, body)

    def list(self, prefix: str) -> Iterable[ObjectInfo]:
        return self._call(self.store.list, prefix)

    def delete(self, key: str) -> None:
        self._call(self.store.delete, key)

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete each key by a call of its own, in any order, so that any part of them may remain."""
        for key in self._draw.sample(keys, len(keys)):
            self.delete(key)

    def size(self, key: str) -> int | None:
        return self._call(self.store.size, key)

    def sweep_uploads(self, older_than_s: float) -> int:
        return self._call(self.store.sweep_uploads, older_than_s)
