"""The reader: joins a sample order with a source of rows, and turns raw rows into what the model takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_api.data import DenseInputSpec
from dlrm_api.errors import BadDataError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import ModelSpec, TableSpec
from dlrm_trainer.data.batch import Batch, RawRows, RowSource, no_rows
from dlrm_trainer.data.hashing import rows_of_ids
from dlrm_trainer.data.order import SampleOrder
from dlrm_trainer.data.prefetch import prefetched

Split = Literal["train", "eval"]

PREFETCH_BATCHES = 2
"""Batches made ahead: one is being sent to its rows' owners while the next is read."""


class Reader:
    """One rank's view of one split. Any batch can be read at any time; there is no position to keep."""

    def __init__(
        self,
        source: RowSource,
        order: SampleOrder,
        model: ModelSpec,
        features: int,
        dense: DenseInputSpec,
        rank: int,
        world_size: int,
    ) -> None:
        self._source = source
        self._order = order
        tables = model.all_tables()
        self._bags = tuple((tables[feature.table], feature.column) for feature in model.all_features())
        self._weighted = any(feature.weights for feature in model.all_features())
        self._features = features
        self._dense = dense
        self._rank = rank
        self._world_size = world_size
        self.num_samples = order.num_samples
        self.batch_size = order.batch_size
        self.batches_per_epoch = order.batches_per_epoch

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON document of all that batch numbers mean: equal fingerprints give equal batches."""
        order = {
            "globalBatchSize": self._order.batch_size,
            "virtualShards": self._order.virtual_shards,
            "windowRows": self._order.window_rows,
            "blockRows": self._order.block_rows,
            "seed": self._order.seed,
        }
        return {"samples": self.num_samples, **self._source.fingerprint, "order": order}

    def global_count(self, batch: int) -> int:
        """Samples of a global batch over all ranks."""
        return self._order.global_count(batch)

    def read(self, batch: int) -> Batch:
        """This rank's slice of a global batch: a pure function of ``batch``.

        Raises:
            BadDataError: a row can't be used; the message names the file, the row, the column or table and the mend.
        """
        sample_ids = self._order.sample_ids(batch, self._rank, self._world_size)
        raw = self._source.rows(sample_ids) if sample_ids.size else no_rows(len(self._bags), self._features, self._weighted)
        return Batch(
            number=batch,
            sample_ids=torch.from_numpy(sample_ids),
            dense=torch.from_numpy(dense_inputs(raw.dense, self._dense)),
            labels=torch.from_numpy(raw.labels),
            lengths=torch.from_numpy(raw.lengths),
            values=torch.from_numpy(self._values(raw, sample_ids)),
            weights=None if raw.weights is None else torch.from_numpy(raw.weights),
        )

    def iterate(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches ``start`` to ``stop - 1`` in order, read ahead in a thread; close it to stop early."""
        return prefetched(map(self.read, range(start, stop)), PREFETCH_BATCHES)

    def close(self) -> None:
        """Let go of the source's files."""
        self._source.close()

    def _values(self, raw: RawRows, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        values = np.empty_like(raw.ids)
        stops = np.cumsum(raw.lengths.sum(axis=1, dtype=np.int64))
        start = 0
        for number, ((table, column), stop) in enumerate(zip(self._bags, stops.tolist(), strict=True)):
            lengths = raw.lengths[number]
            if lengths.size and (longest := int(lengths.argmax()), lengths.max() > table.max_lookups)[1]:
                self._refuse_bag(table, column, int(lengths[longest]), int(sample_ids[longest]))
            ids = raw.ids[start:stop]
            values[start:stop], outside = rows_of_ids(ids, table.rows, table.embedding.hash)
            if outside is not None:
                first = int(outside.argmax())
                sample = int(np.searchsorted(np.cumsum(lengths), first, side="right"))
                self._refuse_id(table, column, int(ids[first]), int(ids.max()), int(sample_ids[sample]))
            start = stop
        return values

    def _refuse_bag(self, table: TableSpec, column: str, length: int, sample_id: int) -> NoReturn:
        raise BadDataError(
            f"{self._source.where(sample_id)}: the bag of table {table.name} (column {column}) has {length} ids, "
            f"more than maxLookups {table.max_lookups}: raise maxLookups of the table, or shorten the bag"
        )

    def _refuse_id(self, table: TableSpec, column: str, value: int, largest: int, sample_id: int) -> NoReturn:
        mend = (
            f"raise rows to at least {largest + 1}, or set embedding.hash: mix on the table"
            if value >= 0
            else "ids without a hash start at 0: mend the data, or set embedding.hash: mix on the table"
        )
        raise BadDataError(
            f"{self._source.where(sample_id)}: id {value} of table {table.name} (column {column}) "
            f"is no row of its {table.rows} rows: {mend}"
        )


def dense_inputs(values: NDArray[np.float32], spec: DenseInputSpec) -> NDArray[np.float32]:
    """Fill missing (NaN) values in and apply the transform: (n, F) float32 to the same, finite."""
    filled = np.where(np.isnan(values), np.float32(spec.missing), values)
    return np.log1p(np.maximum(filled, np.float32(0))) if spec.transform == "log1p" else filled


def sample_order(spec: DLRMJobSpec, split: Split, num_samples: int) -> SampleOrder:
    """The order of a split: shuffled for training, the files' own for evaluation."""
    return SampleOrder(
        num_samples=num_samples,
        batch_size=spec.data.global_batch_size,
        virtual_shards=spec.data.virtual_shards,
        window_rows=spec.data.shuffle.window_rows if split == "train" else 0,
        block_rows=spec.data.shuffle.block_rows,
        seed=spec.training.seed,
    )
