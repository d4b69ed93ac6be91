"""RocksDB as a level: the same cache above, another store below."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rocksdict import (
    BlockBasedOptions,
    Cache,
    ChecksumType,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from dlrm_api.tiers import Tier
from dlrm_trainer.embedding.tiers.slots import Finish, Places, Records, Rows, finished

BLOOM_BITS = 10
WRITE_BUFFER = 64 << 20
CACHE = 64 << 20
"""As much as our block level has for buffers."""


class RocksLevel:
    """Implements ``Level`` as the last one of a stack: a record's key is its row, and so is its place.

    No write-ahead log, no compression, no checksums, direct reads and writes, bloom filters, universal compaction: what
    FBGEMM's SSD tables set, as far as rocksdict lets one. A row that leaves is not deleted: it will be written again,
    and a tombstone would cost the peer more than the space that it frees.

    Args:
        folder: on the device.
        rows: of the class.
        words: of a record.
        readers: threads that ask for a part of the rows each: one alone waits for the device row by row.
    """

    tier: Tier = "block"

    def __init__(self, folder: Path, rows: int, words: int, readers: int) -> None:
        self.places, self.used, self._words = rows, 0, words
        self._readers, self._threads = readers, ThreadPoolExecutor(readers)
        self._folder = Path(tempfile.mkdtemp(prefix="rocks-", dir=folder))
        self._database = Rdict(str(self._folder), _options())
        no_log: Any = WriteOptions()
        no_log.disable_wal = True
        self._no_log = no_log

    @property
    def bytes_kept(self) -> dict[Tier, int]:
        """See ``Level``."""
        return {"block": sum(file.stat().st_blocks * 512 for file in self._folder.iterdir())}

    def write(self, rows: Rows, records: Records) -> Places:
        """See ``Level``."""
        batch = WriteBatch(raw_mode=True)
        for key, value in zip(_parts(rows), _parts(records), strict=True):
            batch.put(key, value)
        self._database.write(batch, self._no_log)
        self.used += len(rows)
        return rows.copy()

    def read(self, places: Places, out: Records) -> Finish:
        """See ``Level``."""
        order = np.argsort(places)  # neighbours share blocks
        parts = [part for part in np.array_split(order, self._readers) if len(part)]
        for part, found in zip(parts, self._threads.map(self._get, (places[part] for part in parts)), strict=True):
            out[part] = found
        return finished

    def _get(self, places: Places) -> Records:
        found: Any = self._database.get([*_parts(places)])
        return np.frombuffer(b"".join(found), np.uint32).reshape(len(places), self._words)

    def free(self, places: Places) -> None:
        """See ``Level``."""
        self.used -= len(places)

    def coldest(self, count: int) -> tuple[Rows, Places]:
        """See ``Level``."""
        raise AssertionError(f"{count} rows were to leave the last level")

    def settle(self) -> None:
        """Have everything on the device, and compacted."""
        self._database.flush(True)
        self._database.compact_range(None, None)

    def close(self) -> None:
        """See ``Level``."""
        self._threads.shutdown()
        self._database.close()
        shutil.rmtree(self._folder)


def _parts(values: NDArray[np.int64] | NDArray[np.uint32]) -> list[bytes]:
    """Return the bytes of each row of an array."""
    count = len(values)
    whole = (values.astype(">i8") if values.ndim == 1 else np.ascontiguousarray(values)).tobytes()
    size = len(whole) // count if count else 0
    return [whole[start : start + size] for start in range(0, len(whole), size or 1)]


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    options.set_use_direct_reads(True)
    options.set_use_direct_io_for_flush_and_compaction(True)
    options.set_write_buffer_size(WRITE_BUFFER)
    options.set_max_write_buffer_number(4)
    options.set_min_write_buffer_number_to_merge(2)
    options.set_compaction_style(DBCompactionStyle.universal())
    options.set_level_zero_file_num_compaction_trigger(8)
    options.set_level_zero_slowdown_writes_trigger(32)
    options.set_level_zero_stop_writes_trigger(64)
    options.set_target_file_size_base(2 << 30)
    options.set_allow_concurrent_memtable_write(False)
    options.increase_parallelism(2)
    blocks = BlockBasedOptions()
    blocks.set_bloom_filter(BLOOM_BITS, False)
    blocks.set_block_size(4096)
    blocks.set_block_cache(Cache(CACHE))
    blocks.set_checksum_type(ChecksumType.no_checksum())
    options.set_block_based_table_factory(blocks)
    return options
