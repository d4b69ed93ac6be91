"""What the words of a record mean: a row, then its optimizer state, then its access count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.tiers import RowDtype
from dlrm_trainer.embedding.tiers.level import Records


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """How a class of tables keeps a row of ``dim`` columns and S values of state in W = ``words`` words."""

    dim: int
    dtype: RowDtype
    """Of a row; its state is always float32."""
    words: int
    """Of a record; the last one is the access count."""

    @property
    def kept_words(self) -> int:
        """Words of a row and its state, without its access count."""
        return self.words - 1

    @property
    def state_values(self) -> int:
        """S, values of a row's state."""
        return self.kept_words - self._row_words

    @property
    def _row_words(self) -> int:
        return self.dim if self.dtype == "fp32" else self.dim // 2

    def values(self, records: Records) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Rows (N, dim) and row state (N, S) of records, both float32; fp16 rows are exact in it."""
        row = np.ascontiguousarray(records[:, : self._row_words])
        weights = row.view(np.float32 if self.dtype == "fp32" else np.float16).astype(np.float32, copy=False)
        return weights, np.ascontiguousarray(records[:, self._row_words : self.kept_words]).view(np.float32)

    def records(self, weights: NDArray[np.float32], state: NDArray[np.float32]) -> Records:
        """Records of rows (N, dim) and their state (N, S); the other way round. Access counts start anew."""
        out = np.empty((len(weights), self.words), np.uint32)
        self.begin(weights, out)
        out[:, self._row_words : self.kept_words] = np.ascontiguousarray(state).view(np.uint32)
        return out

    def begin(self, weights: NDArray[np.float32], out: Records) -> None:
        """Fill ``out`` with the records of rows (N, dim) that were never updated: their state and count are zero."""
        values = weights if self.dtype == "fp32" else weights.astype(np.float16)
        out[:, : self._row_words] = np.ascontiguousarray(values).view(np.uint32)
        out[:, self._row_words :] = 0
