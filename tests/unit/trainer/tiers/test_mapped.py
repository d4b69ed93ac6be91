"""Memory that loads and stores reach: taken when it is needed, and never beyond what the device has."""

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import numpy as np
import pytest

from dlrm_api.errors import DeviceError
from dlrm_trainer.embedding.tiers import memory
from dlrm_trainer.embedding.tiers.memory import AnonymousStorage, MappedStorage

WORDS = 64
Limit = Callable[[int], AbstractContextManager[None]]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_terabyte_of_places_takes_no_memory_until_rows_come() -> None:
    before = resident_bytes()

    with closing(AnonymousStorage(WORDS, 1 << 32)) as storage:
        storage.ensure(1_000)
        storage.records[:1_000] = 3
        took, kept = resident_bytes() - before, storage.bytes_kept

    assert kept == pytest.approx(1_000 * WORDS * 4, abs=4_096)
    assert took < 16 << 20


def test_a_mapped_file_holds_what_is_stored_and_has_no_name(tmp_path: Path) -> None:
    with closing(MappedStorage(tmp_path, WORDS, 100_000, "scm")) as storage:
        storage.ensure(50_000)
        storage.records[:50_000] = np.arange(50_000, dtype=np.uint32)[:, None]

        assert list(tmp_path.iterdir()) == []
        assert storage.records.shape == (100_000, WORDS)
        np.testing.assert_array_equal(storage.records[:50_000, 7], np.arange(50_000))


def test_a_full_file_keeps_what_was_promised_and_an_empty_one_nothing(tmp_path: Path) -> None:
    places = 200_000
    with closing(MappedStorage(tmp_path, WORDS, places, "cxl")) as storage:
        empty = storage.bytes_kept
        storage.ensure(1)
        storage.ensure(places)
        full = storage.bytes_kept

    assert empty == 0
    assert full == pytest.approx(places * WORDS * 4, rel=0.05)


def test_a_file_grows_in_steps_that_end_with_its_last_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "STEP_BYTES", 1 << 20)
    places = 10_000  # 2.44 MiB
    with closing(MappedStorage(tmp_path, WORDS, places, "scm")) as storage:
        kept = []
        for wanted in (1, 4_096, 4_097, places):
            storage.ensure(wanted)
            kept.append(storage.bytes_kept)

    assert kept[0] == kept[1] == 1 << 20
    assert kept[2] == 2 << 20
    assert kept[3] == pytest.approx(places * WORDS * 4, abs=4_096)


def test_a_full_device_is_an_error_with_path_and_bytes_and_kills_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, free = os.posix_fallocate, 4 << 20

    def small(fd: int, offset: int, length: int) -> None:
        if offset + length > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", small)
    with closing(MappedStorage(tmp_path, WORDS, 100_000, "scm")) as storage:
        storage.ensure(16_000)
        storage.records[:16_000] = 5
        with pytest.raises(DeviceError) as caught:
            storage.ensure(17_000)
        held = storage.records[:16_000].copy()

    assert (held == 5).all()
    assert str(tmp_path) in str(caught.value)
    assert "256,000 bytes for rows after 4,096,000" in str(caught.value)
    assert "No space left on device" in str(caught.value)


def test_a_file_too_long_for_the_mount_is_an_error_with_path_and_bytes(tmp_path: Path, files_end_at: Limit) -> None:
    with files_end_at(1 << 20), pytest.raises(DeviceError) as caught:
        MappedStorage(tmp_path, WORDS, 100_000, "scm")

    assert str(tmp_path) in str(caught.value)
    assert "25,600,000 bytes for tier scm: File too large" in str(caught.value)


def test_closing_gives_the_device_its_room_back_even_with_a_view_left(tmp_path: Path) -> None:
    storage = MappedStorage(tmp_path, WORDS, 1_000, "scm")
    storage.ensure(1_000)
    view = storage.records[:10]
    view[:] = 9

    storage.close()

    assert (view == 9).all()
    assert len(storage.records) == 0


def test_memory_comes_from_the_mounts_node_where_the_host_has_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "node_of_folder", lambda folder: 2 if folder == tmp_path else None)
    monkeypatch.setattr(memory, "memory_nodes", lambda: (0, 2))
    monkeypatch.setattr(memory, "bind", lambda address, size, node: bound.append((size, node)))

    MappedStorage(tmp_path, WORDS, 1_000, "cxl").close()

    assert bound == [(1_000 * WORDS * 4, 2)]
