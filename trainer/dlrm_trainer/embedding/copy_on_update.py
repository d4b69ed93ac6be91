"""Rows of a cut that stay where they are: copied while training goes on, or by the rank before it updates them.

Source: copy on update (Salles et al., An Evaluation of Checkpoint Recovery for Massively Multiplayer Online Games,
VLDB 2009).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer import Laid, Rows
from dlrm_kernels.cache import kernel
from dlrm_kernels.dirty_rows import UNIT_WORDS, WORD, Words
from dlrm_kernels.intrinsics import bit_count, borrowed, lowest_bit, size_of, value_of
from dlrm_kernels.parallel import single_threaded
from dlrm_kernels.row_updates import memory_of, widened
from dlrm_trainer.embedding.changes import DirtyRows
from dlrm_trainer.embedding.checkpoint import ResidentPart, copy_rows
from dlrm_trainer.embedding.pending import Changing
from dlrm_trainer.embedding.placement import joined

U64 = np.uint64
ONE, SIX, SIXTY_THREE = U64(1), U64(6), U64(63)
UNIT_SHIFT = U64(UNIT_WORDS.bit_length() - 1)
CHUNK_ROWS = 1 << 14
"""Rows copied at a time, or those of a unit: what an update may have to wait for."""
Lay = Callable[[Sequence[Rows]], list[Laid]]
"""Gives memory for those of some rows that are any."""


class _Map(NamedTuple):
    """Where the changed rows of some parts are in a cut, as compiled loops use it; K parts, W words."""

    changed: Words
    """(W,) a bit for each row that is in the cut."""
    pending: Words
    """(W,) those that are not copied yet."""
    words: NDArray[np.uint64]
    """(K,) where the words of each part begin."""
    units: NDArray[np.uint64]
    """(K,) where its units begin."""
    places: NDArray[np.uint64]
    """Of each unit, the number of its first changed row among those of its part; and of one more, in each part, all."""
    first_rows: NDArray[np.uint64]
    """(K,) of each part, in the memory of all."""
    rows_at: NDArray[np.uint64]
    """(K,) where the part's rows begin in the file."""
    states_at: NDArray[np.uint64]


class Image:
    """What a cut holds of the parts of one record of changed rows, which lie in one memory."""

    def __init__(self, parts: Sequence[ResidentPart]) -> None:
        self.parts, record = parts, parts[0].dirty.rows
        words = [-(-size // WORD) for size in record.sizes]
        units = [-(-count // UNIT_WORDS) + 1 for count in words]
        self._words = [*accumulate(words, initial=0)]
        self._units = [*accumulate(units, initial=0)]
        changed = record.all_bits()
        places = np.zeros(self._units[-1], np.uint64)
        starts, firsts = np.array(self._words, np.uint64), np.array(self._units, np.uint64)
        _count_changed(changed, starts, firsts, places)
        self.counts = [int(places[end - 1]) for end in self._units[1:]]
        self._size, self._width = size_of(parts[0].weight.shape[1]), U64(parts[0].state.shape[1])
        count = len(parts)
        self._memory = memory_of(
            joined([part.weight for part in parts], 0, count).numpy(),
            joined([part.state for part in parts], 0, count).numpy(),
        )
        nowhere = np.zeros(count, np.uint64)
        self._map = _Map(
            changed=changed,
            pending=changed.copy(),
            words=starts[:-1],
            units=firsts[:-1],
            places=places,
            first_rows=np.array([*accumulate(record.sizes, initial=0)][:-1], np.uint64),
            rows_at=nowhere,
            states_at=nowhere.copy(),
        )
        self._laid: list[Laid | None] = [None] * count
        self._file = np.zeros(0, np.float32)

    @property
    def wanted(self) -> list[Rows]:
        """What there must be memory for; of parts without a changed row too."""
        return [
            Rows(shard=part.shard, count=count, state_values=part.state.shape[1])
            for part, count in zip(self.parts, self.counts, strict=True)
        ]

    def take(self, laid: Iterator[Laid]) -> None:
        """Take memory for the parts that have a changed row, in their order."""
        for number, count in enumerate(self.counts):
            if count:
                self._laid[number] = given = next(laid)
                self._file = given.memory
                self._map.rows_at[number], self._map.states_at[number] = given.rows_at, given.state_at

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """A part's number and units [first, stop) of it, in which about ``CHUNK_ROWS`` rows changed, or any."""
        for number, (start, end) in enumerate(zip(self._units, self._units[1:], strict=False)):
            places, first = self._map.places[start:end], 0
            while places[first] < places[-1]:
                stop = max(first + 1, int(np.searchsorted(places, places[first] + U64(CHUNK_ROWS), side="right")) - 1)
                yield number, first, stop
                first = stop

    def copy(self, number: int, first: int, stop: int) -> int:
        """Copy what is not copied yet of some units of a part, and number all of their changed rows; returns bytes."""
        part, laid, start = self.parts[number], self._laid[number], self._units[number]
        assert laid is not None
        begin, end = (int(self._map.places[start + unit]) for unit in (first, stop))
        rows, places = np.empty(end - begin, np.int64), np.empty(end - begin, np.int64)
        here = slice(
            self._words[number] + first * UNIT_WORDS,
            min(self._words[number] + stop * UNIT_WORDS, self._words[number + 1]),
        )
        count = _list_pending(
            self._map.changed[here],
            self._map.pending[here],
            first * UNIT_WORDS * WORD,
            part.shard.row_start,
            begin,
            laid.row_ids,
            rows,
            places,
        )
        copy_rows(part.weight, part.state, rows[:count], laid.rows, laid.state, places[:count])
        return int(count) * 4 * (part.weight.shape[1] + part.state.shape[1])

    def save(self, ids: NDArray[np.int64], sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Copy the rows of each segment of ids that are not copied yet; see ``DirtyRows.mark``."""
        parts = np.searchsorted(self._words, starts // WORD, side="right") - 1
        _save_pending(self._size, self._memory, self._map, self._width, ids, sizes, starts, parts, self._file)


class CopyOnUpdate:
    """Copies the changed rows of parts that stay where they are, as they were when this was made; ``BeforeUpdates``.

    Each row goes to its place in the cut, whoever copies it, so that the cut is as if it had been copied at once.

    Args:
        parts: at rest; all of the host.
        lay: gives memory of the cut.
    """

    def __init__(self, parts: Sequence[ResidentPart], lay: Lay) -> None:
        records: dict[DirtyRows, list[ResidentPart]] = {}
        for part in parts:
            records.setdefault(part.dirty.rows, []).append(part)
        self._images = {record: Image(each) for record, each in records.items()}
        laid = iter(lay([rows for image in self._images.values() for rows in image.wanted]))
        nothing = np.empty(0, np.int64)
        for image in self._images.values():
            image.take(laid)
            image.save(nothing, nothing, nothing)  # compiled here, once, and not when a step waits for it
        self._left = ((image, chunk) for image in self._images.values() for chunk in image.chunks())
        self._turns = _Turns()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._problem: BaseException | None = None
        self.done = False
        """Whether all is copied."""

    def before_update(self, rows: Changing) -> None:
        """See ``BeforeUpdates``."""
        image = self._images.get(rows.record)
        if image is not None and not self.done:
            with self._turns.taken():
                image.save(rows.ids, rows.sizes, rows.starts)

    def copy(self, most: int | None = None) -> None:
        """Copy ``most`` bytes, or a little more, or all that is left; no other thread may do so meanwhile."""
        copied = 0
        while not self._stop and (most is None or copied < most):
            chunk = next(self._left, None)
            if chunk is None:
                self.done = True
                return
            image, where = chunk
            with self._turns.taken():
                copied += image.copy(*where)

    def start(self) -> None:
        """Copy all that is left in a thread."""
        self._thread = threading.Thread(target=self._run, name="dlrm-cut", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with single_threaded():
                self.copy()
        except BaseException as error:
            self._problem = error

    def ended(self) -> bool:
        """Whether nothing is left to do.

        Raises:
            BaseException: what ended the thread.
        """
        if self._problem is not None:
            raise self._problem
        return self.done

    def wait(self) -> None:
        """Wait until all is copied; raises what ``ended`` does."""
        if self._thread is not None:
            self._thread.join()
        self.ended()

    def close(self) -> None:
        """End the thread, after the chunk that it is at; the cut's memory may go then."""
        self._stop = True
        if self._thread is not None:
            self._thread.join()


class _Turns:
    """A lock that a thread gets after one turn of another, though that takes it again and again."""

    def __init__(self) -> None:
        self._next, self._turn = threading.Lock(), threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Be the only one within the block."""
        with self._next:
            self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()


@kernel
def _count_changed(changed: Any, words: Any, units: Any, places: Any) -> None:
    """Fill ``_Map.places`` in; ``words`` and ``units`` have one more, at the end."""
    for part in range(len(words) - 1):
        total, unit = U64(0), units[part]
        for word in range(words[part], words[part + 1]):
            if (word - words[part]) & (U64(UNIT_WORDS) - ONE) == U64(0):
                places[unit] = total
                unit += ONE
            total += bit_count(changed[word])
        places[unit] = total


@kernel
def _list_pending(
    changed: Any, pending: Any, row: Any, first_row: Any, place: Any, ids: Any, rows: Any, places: Any
) -> Any:
    """List the rows that are still to be copied, and their places; leave none. Numbers all that changed.

    Args:
        changed: words of some units.
        pending: likewise; zero afterwards.
        row: of the first bit, counted from the part's first.
        first_row: the part's first, in its table.
        place: of the first changed row.
        ids: (N,) of the part's changed rows.
        rows: filled.
        places: filled.

    Returns:
        how many.
    """
    count = np.int64(0)
    for at in range(len(changed)):
        word, left = changed[at], pending[at]
        while word:
            bit = lowest_bit(word)
            here = row + np.int64(bit)
            ids[place] = here + first_row
            rows[count], places[count] = here, place
            count += np.int64((left >> bit) & ONE)
            word &= word - ONE
            place += 1
        pending[at] = U64(0)
        row += WORD
    return count


@kernel
def _save_pending(
    size: Any, memory: Any, map_: Any, width: Any, ids: Any, sizes: Any, starts: Any, parts: Any, file: Any
) -> None:
    dim, memory, map_, file = value_of(size), borrowed(memory), borrowed(map_), borrowed(file)
    first = 0
    for segment in range(len(sizes)):
        part, start = parts[segment], U64(starts[segment])
        for n in range(first, first + sizes[segment]):
            bit = start + U64(ids[n])
            word, mask = bit >> SIX, ONE << (bit & SIXTY_THREE)
            if map_.pending[word] & mask == U64(0):
                continue
            map_.pending[word] &= ~mask
            unit = (word - map_.words[part]) >> UNIT_SHIFT
            place = map_.places[map_.units[part] + unit] + bit_count(map_.changed[word] & (mask - ONE))
            for before in range(map_.words[part] + (unit << UNIT_SHIFT), word):
                place += bit_count(map_.changed[before])
            source = map_.first_rows[part] + U64(ids[n])
            row, into = source * dim, map_.rows_at[part] + place * dim
            if memory.half:
                for c in range(dim):
                    file[into + c] = widened(memory.halves[row + c])
            else:
                for c in range(dim):
                    file[into + c] = memory.rows[row + c]
            state, into = source * width, map_.states_at[part] + place * width
            for c in range(width):
                file[into + c] = memory.states[state + c]
        first += sizes[segment]
