"""Reads and writes at queue depth: every piece whole, or an error that names what is missing."""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.errors import DeviceError
from dlrm_trainer.embedding.tiers import aio
from dlrm_trainer.embedding.tiers.aio import ScratchFile

PIECE = 4_096
PIECES = 600


@pytest.fixture
def file(direct_folder: Path) -> Iterator[ScratchFile]:
    """A file with page n full of the number n."""
    with closing(ScratchFile(direct_folder, direct=True)) as file:
        pages = aio.page_aligned(PIECES, PIECE // 4)
        pages[:] = np.arange(PIECES, dtype=np.uint32)[:, None]
        os.pwrite(file.fd, pages, 0)
        yield file


def contents(reader: aio.DirectReader, pages: np.ndarray) -> np.ndarray:
    """First and last word of each page asked for."""
    found = np.full((len(pages), 2), -1, np.int64)
    with closing(reader.pieces(pages * PIECE)) as pieces:
        for which, buffers in pieces:
            found[which] = reader.buffers[buffers][:, [0, -1]]
    return found


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, PIECES - 1), max_size=300), st.integers(1, 64))
def test_each_piece_comes_once_and_whole_at_any_depth(file: ScratchFile, pages: list[int], depth: int) -> None:
    wanted = np.array(pages, np.int64)

    with closing(aio.DirectReader(file, depth, PIECE)) as reader:
        found = contents(reader, wanted)

    np.testing.assert_array_equal(found, np.stack((wanted, wanted), axis=1))


def test_what_was_written_behind_is_read_back(file: ScratchFile) -> None:
    with closing(aio.DirectWriter(file, 3, 2 * PIECE)) as writer:
        for number in range(3):
            writer.buffers[number] = 1_000 + number
            writer.write(number, 2 * PIECE * number)
        done: list[int] = []
        while len(done) < 3:
            done += writer.written(1)

    assert sorted(done) == [0, 1, 2]
    with closing(aio.DirectReader(file, 4, PIECE)) as reader:
        assert contents(reader, np.arange(7))[:, 1].tolist() == [1_000, 1_000, 1_001, 1_001, 1_002, 1_002, 6]


def test_a_piece_that_came_in_part_is_completed(file: ScratchFile, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = aio.Queue.finished
    with closing(aio.DirectReader(file, 8, PIECE)) as reader:

        def half(queue: aio.Queue, at_least: int) -> np.ndarray:
            events = whole(queue, at_least)
            events["result"] = PIECE // 2
            reader.buffers[events["data"].astype(np.int64), PIECE // 8 :] = 0xDEAD
            return events

        monkeypatch.setattr(aio.Queue, "finished", half)
        found = contents(reader, np.arange(50))

    np.testing.assert_array_equal(found[:, 1], np.arange(50))


def test_a_piece_beyond_the_end_is_an_error_with_file_offset_and_bytes(file: ScratchFile) -> None:
    os.ftruncate(file.fd, 100 * PIECE + 512)

    with closing(aio.DirectReader(file, 8, PIECE)) as reader:
        with pytest.raises(DeviceError) as caught:
            contents(reader, np.arange(90, 110))
        assert reader.queue.in_flight == 0
        np.testing.assert_array_equal(contents(reader, np.arange(90))[:, 0], np.arange(90))

    assert str(file.path) in str(caught.value)
    assert "bytes at" in str(caught.value)


def test_a_request_that_the_kernel_refuses_is_an_error_that_says_why(file: ScratchFile) -> None:
    with closing(aio.DirectReader(file, 8, PIECE)) as reader, pytest.raises(DeviceError, match="Invalid argument"):
        for _ in reader.pieces(np.array([1])):  # not aligned
            pass


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, PIECES - 1), min_size=1, max_size=3, unique=True), max_size=30), st.randoms())
def test_pieces_read_early_are_those_last_expected(file: ScratchFile, turns: list[list[int]], random: Random) -> None:
    with closing(aio.EarlyReader(file, 3, PIECE)) as reader:
        for pages in turns:
            reader.expect([(page, page * PIECE) for page in pages])
            taken = pages[: random.randint(0, 1)]
            found = [reader.take(page)[[0, -1]].tolist() for page in taken]

            assert found == [[page, page] for page in taken]


def test_pieces_that_are_expected_again_are_read_once(file: ScratchFile) -> None:
    with closing(aio.EarlyReader(file, 3, PIECE)) as reader:
        begun = [reader.expect([(page, page * PIECE) for page in pages]) for pages in ([1, 2], [2, 1], [2, 3])]
        reader.take(2)
        begun.append(reader.expect([(2, 2 * PIECE)]))

    assert begun == [2, 0, 1, 0]


def test_an_early_piece_beyond_the_end_is_an_error_and_frees_its_buffer(file: ScratchFile) -> None:
    os.ftruncate(file.fd, 100 * PIECE + 512)

    with closing(aio.EarlyReader(file, 1, PIECE)) as reader:
        for page in (100, 101):
            reader.expect([(page, page * PIECE)])
            with pytest.raises(DeviceError, match="bytes at"):
                reader.take(page)
        reader.expect([(99, 99 * PIECE)])

        assert reader.take(99)[0] == 99


def test_a_kernel_without_memory_is_asked_again(file: ScratchFile, monkeypatch: pytest.MonkeyPatch) -> None:
    call, refusals = aio._call, iter([True] * 3)

    def busy(name: int, *arguments: int) -> int:
        if name == aio._SUBMIT and next(refusals, False):
            raise OSError(errno.EAGAIN, "again")
        return call(name, *arguments)

    monkeypatch.setattr(aio, "_call", busy)
    with closing(aio.DirectReader(file, 8, PIECE)) as reader:
        found = contents(reader, np.arange(50))

    np.testing.assert_array_equal(found[:, 0], np.arange(50))


def test_signals_interrupt_no_read(file: ScratchFile) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with closing(aio.DirectReader(file, 8, PIECE)) as reader:
            rounds = 0
            while len(seen) < 20 and rounds < 2_000:
                rounds += 1
                np.testing.assert_array_equal(contents(reader, np.arange(PIECES))[:, 0], np.arange(PIECES))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert len(seen) >= 20


def test_a_host_without_requests_left_is_told_which_limit_to_raise() -> None:
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())

    with pytest.raises(DeviceError, match=r"fs\.aio-max-nr"):
        aio.Queue(limit + 1)
