"""How fast a slower tier is, measured through the level that would hold its rows in training."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm_api.errors import DeviceError, NoInputError
from dlrm_api.tiers import BLOCK_SLACK, Tier
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.byte_level import ByteLevel
from dlrm_trainer.embedding.tiers.level import Level, Places, Records, Rows
from dlrm_trainer.embedding.tiers.mapped import MappedStorage

RECORD_WORDS = 66
"""64 columns of fp32, a value of optimizer state and an access count."""
RECORD_BYTES = 4 * RECORD_WORDS
BATCH_RECORDS = 32_768
FREE_SHARE = 4
"""No more than one part in so many of what is free is written."""


@dataclass(frozen=True, kw_only=True)
class TierEffort:
    """How much work a measurement is."""

    bytes: int
    """Of the file that records are written to."""
    seconds: float
    """That records are read and written at random."""


EFFORT = TierEffort(bytes=1 << 30, seconds=3.0)
LEAST_BYTES = 4 * BATCH_RECORDS * RECORD_BYTES


@dataclass(frozen=True, kw_only=True)
class TierRates:
    """Of one folder, by one process."""

    bytes: int
    """Free now."""
    read_bytes_per_second: float
    """Of all records one after the other."""
    write_bytes_per_second: float
    read_iops: float
    """Records at random; pages of block storage."""
    write_iops: float | None
    """Records at random; None: block storage is written in sequence alone."""


def tier_rates(tier: Tier, folder: Path, effort: TierEffort = EFFORT) -> TierRates:
    """Write a file of records to a folder of ``cxl``, ``scm`` or ``block`` storage, read it, and leave nothing.

    Memory that the page cache stands before is measured with it, as trainers meet it too; block storage without.

    Raises:
        NoInputError: the folder is not there.
        DeviceError: it has too little room, or can't be used as this tier.
    """
    if not folder.is_dir():
        raise NoInputError(f"--tier: {folder}: no such folder: give one on the {tier} tier's mount")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DeviceError(f"{folder}: {error.strerror}: give a folder on the {tier} tier's mount") from error
    size = min(effort.bytes, free // FREE_SHARE)
    if size < min(effort.bytes, LEAST_BYTES):
        raise DeviceError(
            f"{folder}: {free:,} bytes are free, too few to measure it: make room for {LEAST_BYTES * FREE_SHARE:,}"
        )
    records = size // RECORD_BYTES
    if tier == "block":
        slack = int(records * BLOCK_SLACK)
        with closing(BlockLevel(folder, RECORD_WORDS, slack, records, _none_moves)) as block:
            return _block_rates(block, free, records, effort.seconds)
    storage = MappedStorage(folder, RECORD_WORDS, records, tier)
    with closing(ByteLevel(tier, storage, records, ordered=False)) as level:
        return _byte_rates(level, free, records, effort.seconds)


def _block_rates(level: BlockLevel, free: int, records: int, seconds: float) -> TierRates:
    places, write = _filled(level, records)
    before, spent = level.reads, sum(_reads_at_random(level, places, seconds))
    read_iops = (level.reads - before) / spent
    scanned, start = level.bytes_read, time.perf_counter()
    for _ in level.scan():
        pass
    return TierRates(
        bytes=free,
        read_bytes_per_second=(level.bytes_read - scanned) / (time.perf_counter() - start),
        write_bytes_per_second=write,
        read_iops=read_iops,
        write_iops=None,
    )


def _byte_rates(level: ByteLevel, free: int, records: int, seconds: float) -> TierRates:
    places, _ = _filled(level, records)  # takes pages from the kernel, which training does once
    batches = list(_reads_at_random(level, places, seconds))
    out, start = _records(BATCH_RECORDS), time.perf_counter()
    for some in _in_batches(places):
        level.read(some, out[: len(some)])()
    read = len(places) * RECORD_BYTES / (time.perf_counter() - start)
    start = time.perf_counter()
    for some in _in_batches(places):
        level.free(some)
        level.write(some, out[: len(some)])
    write = len(places) * RECORD_BYTES / (time.perf_counter() - start)
    written = list(_writes_at_random(level, places, seconds))
    return TierRates(
        bytes=free,
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        read_iops=BATCH_RECORDS * len(batches) / sum(batches),
        write_iops=BATCH_RECORDS * len(written) / sum(written),
    )


def _filled(level: Level, records: int) -> tuple[Places, float]:
    """The places of so many new records, and the bytes/s; the first batch, which compiles, is not counted."""
    places, source, start = [], _records(BATCH_RECORDS), 0.0
    for rows in _in_batches(np.arange(records)):
        places.append(level.write(rows, source[: len(rows)]))
        start = start or time.perf_counter()
    return np.concatenate(places), (records - BATCH_RECORDS) * RECORD_BYTES / (time.perf_counter() - start)


def _reads_at_random(level: Level, places: Places, seconds: float) -> Iterator[float]:
    """The seconds of each batch of reads, for so many seconds; the first batch, which compiles, is not among them."""
    out = _records(BATCH_RECORDS)
    for number, some in enumerate(_at_random(places, seconds)):
        start = time.perf_counter()
        level.read(some, out)()
        if number:
            yield time.perf_counter() - start


def _writes_at_random(level: ByteLevel, places: Places, seconds: float) -> Iterator[float]:
    """The same of writes: places that are given back are the next to be taken."""
    source, rows = _records(BATCH_RECORDS), np.arange(BATCH_RECORDS)
    for number, some in enumerate(_at_random(places, seconds)):
        level.free(some)
        start = time.perf_counter()
        level.write(rows, source)
        if number:
            yield time.perf_counter() - start


def _at_random(places: Places, seconds: float) -> Iterator[Places]:
    """Batches of different places, two of them at least."""
    random, until, number = np.random.default_rng(0), time.perf_counter() + seconds, 0
    while number < 2 or time.perf_counter() < until:
        yield places[random.choice(len(places), BATCH_RECORDS, replace=False, shuffle=False)]
        number += 1


def _in_batches(numbers: Places) -> Iterator[Places]:
    for start in range(0, len(numbers), BATCH_RECORDS):
        yield numbers[start : start + BATCH_RECORDS]


def _records(count: int) -> Records:
    return np.ones((count, RECORD_WORDS), np.uint32)


def _none_moves(_rows: Rows, _places: Places) -> None:
    """Records that stay in use are not moved."""
