"""Count the training files and the reads that an epoch makes of them, without reading them whole."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlrm_api.fields import is_s3
from dlrm_api.job import DLRMJobSpec
from dlrm_trainer.data.index import MAX_BYTES
from dlrm_trainer.data.reader import READERS, list_data

PROBED_FILES, PROBED_BYTES = 16, 16 << 20
"""Files of which rows are counted, and bytes of each, if lines have to be read for it."""


class FileCounts(NamedTuple):
    """Count the training files."""

    files: int
    rows: int
    """Exact if there are at most ``PROBED_FILES`` files of whole row groups; else by the rows per byte of some."""
    reads: int


def count_files(spec: DLRMJobSpec) -> FileCounts:
    """Count files, their rows, and the reads of an epoch in which each block of rows is read once.

    Raises:
        DLRMError: as ``list_data`` raises.
        BadDataError: a file cannot be used; names the file.
    """
    files, data_format = list_data(spec, "train").files, READERS[spec.data.format]
    if data_format.indexer is None or data_format.count_reads is None:
        return FileCounts(0, 0, 0)
    indexer, rows, covered, blocks = data_format.indexer(spec), 0, 0, 0
    probed = files[:: -(-len(files) // PROBED_FILES)]
    for file in probed:
        end = file.size if indexer.part_bytes == MAX_BYTES else min(file.size, PROBED_BYTES)
        with file.open_with_tail() as opened:
            found = indexer.read_blocks(file, opened, 0, end)
        rows, covered, blocks = rows + int(found.rows.sum()), covered + end, blocks + found.rows.size
    sizes = np.array([file.size for file in files], np.int64)
    is_remote = any(map(is_s3, spec.data.train.uris))
    reads = data_format.count_reads(sizes, blocks / len(probed), is_remote)
    return FileCounts(len(files), round(rows * int(sizes.sum()) / covered), reads)
