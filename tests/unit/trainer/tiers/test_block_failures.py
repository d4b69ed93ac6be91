"""Devices that are full or fail under a level: a clear error, and never a wrong row."""

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import numpy as np
import pytest

from dlrm_api.errors import DeviceError
from dlrm_trainer.embedding.tiers import block
from dlrm_trainer.embedding.tiers.aio import EarlyReader
from dlrm_trainer.embedding.tiers.block import BlockLevel

WORDS = 66
SEGMENT = 8 * 4_096
Limit = Callable[[int], AbstractContextManager[None]]


def open_level(folder: Path, live: int = 20_000) -> BlockLevel:
    return BlockLevel(folder, WORDS, live * 5 // 4, live, lambda *_: None, SEGMENT)


def records(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.uint32)[:, None] * np.uint32(1_000) + np.arange(WORDS, dtype=np.uint32)


def read(level: BlockLevel, places: np.ndarray) -> np.ndarray:
    out = np.zeros((len(places), WORDS), np.uint32)
    level.read(places, out)()
    return out


def write_in_pieces(level: BlockLevel, rows: np.ndarray, taken: list[np.ndarray]) -> None:
    for first in range(0, len(rows), 100):
        some = rows[first : first + 100]
        taken.append(level.write(some, records(some)))


def backing_file(folder: Path) -> Path:
    """The file without a name that a level has open in a folder."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and str(link.readlink()).startswith(f"{folder}/"):
            return link
    raise AssertionError(f"no file of {folder} is open")


def test_a_full_device_refuses_rows_and_keeps_those_before(
    direct_folder: Path, files_end_at: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "STEP_BYTES", SEGMENT)
    kept, more = np.arange(4_000), np.arange(4_000, 12_000)
    with closing(open_level(direct_folder)) as level:
        places = level.write(kept, records(kept))
        with files_end_at(2 << 20), pytest.raises(DeviceError) as caught:
            level.write(more, records(more))
        used = level.used
        found = read(level, places)
        np.testing.assert_array_equal(read(level, level.write(more, records(more))), records(more))

    assert used == 4_000
    np.testing.assert_array_equal(found, records(kept))
    assert str(direct_folder) in str(caught.value)
    assert "bytes for rows" in str(caught.value)


def test_a_device_with_room_for_the_rows_alone_takes_them(direct_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, free = os.posix_fallocate, 3 << 20

    def small(fd: int, offset: int, length: int) -> None:
        if offset + length > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", small)
    rows = np.arange(8_000)
    with closing(open_level(direct_folder)) as level:
        found = read(level, level.write(rows, records(rows)))
        with pytest.raises(DeviceError, match="No space left on device"):
            level.write(rows + 8_000, records(rows))

    np.testing.assert_array_equal(found, records(rows))


def test_a_failed_write_is_reported_and_every_stored_row_stays_readable(
    direct_folder: Path, files_end_at: Limit
) -> None:
    rows = np.arange(20_000)
    taken: list[np.ndarray] = []
    with closing(open_level(direct_folder)) as level:
        taken.append(level.write(rows[:1_000], records(rows[:1_000])))
        with files_end_at(40 * SEGMENT), pytest.raises(DeviceError, match="cannot write") as caught:
            write_in_pieces(level, rows[1_000:], taken)
        places = np.concatenate(taken)
        found = read(level, places)
        scanned = {int(row) for several, _ in level.scan() for row in several}
        with pytest.raises(DeviceError, match="cannot write"):
            level.write(rows[-1:], records(rows[-1:]))

    assert level.used == len(places) > 1_000
    np.testing.assert_array_equal(found, records(rows[: len(places)]))
    assert scanned == set(range(len(places)))
    assert str(direct_folder) in str(caught.value)


@pytest.mark.parametrize("left", [0, 10 * SEGMENT, 10 * SEGMENT + 512])
def test_a_truncated_file_gives_an_error_instead_of_a_wrong_row(direct_folder: Path, left: int) -> None:
    rows = np.arange(10_000)
    with closing(open_level(direct_folder)) as level:
        places = level.write(rows, records(rows))
        level.write(rows[:0], records(rows[:0]))
        os.truncate(backing_file(direct_folder), left)
        whole = left // 4_096 * 15

        with pytest.raises(DeviceError, match=r"cannot read .* bytes at .*: the file ends before them"):
            read(level, places)
        with pytest.raises(DeviceError, match="cannot read"):
            list(level.scan())

        np.testing.assert_array_equal(read(level, places[:whole]), records(rows[:whole]))


def test_a_victim_that_cannot_be_read_leaves_the_level_as_it_was(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, broken = 2_000, False

    class Broken(EarlyReader):
        def _complete(self, number: int, result: int, verb: str) -> None:
            super()._complete(number, -errno.EIO if broken else result, verb)

    monkeypatch.setattr(block, "EarlyReader", Broken)
    rows, place, held = np.arange(live), np.zeros(live, np.int64), np.ones(live, np.bool_)
    with closing(BlockLevel(direct_folder, WORDS, live * 5 // 4, live, place.__setitem__, SEGMENT)) as level:
        place[:] = level.write(rows, records(rows))
        random, failures = np.random.default_rng(1), 0
        for turn in range(60):
            some = random.permutation(rows)[:300]
            level.free(place[some[held[some]]])
            held[some] = False
            broken = turn % 3 == 2
            try:
                place[some] = level.write(some, records(some))
                held[some] = True
            except DeviceError as error:
                failures += 1
                assert "Input/output error" in str(error)  # noqa: PT017 (some writes need no victim)
            assert level.used == held.sum()
            np.testing.assert_array_equal(read(level, place[held]), records(rows[held]))

    assert failures > 0


def test_a_file_system_without_direct_io_is_told_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            os.close(really_open(path, flags & ~os.O_DIRECT, mode))  # as kernels do: the file is made before
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DeviceError, match="O_DIRECT") as caught:
        open_level(tmp_path)

    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_absent_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="No such file or directory"):
        open_level(tmp_path / "absent")
