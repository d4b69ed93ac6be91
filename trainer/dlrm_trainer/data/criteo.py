"""Criteo's text format: a label, 13 integers and 26 hexadecimal ids, separated by tabs; an empty field is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError
from dlrm_api.job import CRITEO_DENSE, CRITEO_SPARSE
from dlrm_trainer.data.batch import Fingerprint, RawRows
from dlrm_trainer.data.fields import DECIMAL_WIDTH, HEX_WIDTH, Fields, gather_lines
from dlrm_trainer.data.files import FileSet
from dlrm_trainer.data.line_index import line_starts, map_file

SUFFIXES = (".tsv", ".txt")
COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_SPARSE)

MISSING_ID = 2**32
"""Id of an empty field, above every 32-bit id: a missing category hashes to a row of its own and is learnt."""


class CriteoSource:
    """Lines of Criteo files, in any order."""

    def __init__(
        self, paths: Sequence[Path], dense: Sequence[str], tables: Sequence[str], lenient: bool, cache_folder: Path
    ) -> None:
        self._data = [map_file(path) for path in paths]
        self._starts = [line_starts(path, data, cache_folder) for path, data in zip(paths, self._data, strict=True)]
        self._files = FileSet(paths, [starts.size - 1 for starts in self._starts])
        self._dense = np.array([COLUMNS.index(name) for name in dense], dtype=np.intp)
        self._tables = np.array([COLUMNS.index(name) for name in tables], dtype=np.intp)
        self._lenient = lenient
        self.num_samples = self._files.num_rows

    @property
    def fingerprint(self) -> Fingerprint:
        """Names, sizes and line counts of the files."""
        return {"format": "criteo-tsv", "files": self._files.description()}

    def where(self, sample_id: int) -> str:
        """File and line number, as editors take them."""
        path, row = self._files.locate(sample_id)
        return f"{path}:{row + 1}"

    def close(self) -> None:
        """Unmap the files."""
        self._data.clear()

    def rows(self, sample_ids: NDArray[np.int64]) -> RawRows:
        """Read and parse some lines.

        Raises:
            BadDataError: a line has another number of fields or a field that is no label, integer or id.
        """
        fields, counts = Fields.split(self._lines(sample_ids), len(COLUMNS))
        wrong = counts > len(COLUMNS) if self._lenient else counts != len(COLUMNS)
        if wrong.any():
            line = int(wrong.argmax())
            self._refuse_count(int(sample_ids[line]), int(counts[line]))
        labels = self._labels(fields, sample_ids)
        dense, bad = fields.select(self._dense).integers()
        self._check(fields, self._dense, bad, sample_ids, f"is no integer of at most {DECIMAL_WIDTH} digits")
        sparse = fields.select(self._tables)
        ids, bad = sparse.hexadecimal()
        self._check(fields, self._tables, bad, sample_ids, f"is no id of at most {HEX_WIDTH} hexadecimal digits")
        ids[sparse.starts == sparse.stops] = MISSING_ID
        return RawRows(
            dense=dense.astype(np.float32),
            labels=labels,
            lengths=np.ones((self._tables.size, sample_ids.size), dtype=np.int32),
            ids=np.ascontiguousarray(ids.T).reshape(-1),
        )

    def _lines(self, sample_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        texts = [
            gather_lines(self._data[number], self._starts[number][rows], self._starts[number][rows + 1])
            for number, rows in self._files.runs(sample_ids)
        ]
        return np.concatenate(texts)

    def _labels(self, fields: Fields, sample_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        characters = fields.text[fields.starts[:, 0]]
        lengths = fields.stops[:, 0] - fields.starts[:, 0]
        bad = (lengths != 1) | ((characters != ord("0")) & (characters != ord("1")))
        self._check(fields, np.zeros(1, dtype=np.intp), bad[:, None], sample_ids, "is no label: it must be 0 or 1")
        return np.asarray(characters == ord("1"), dtype=np.float32)

    def _check(
        self,
        fields: Fields,
        columns: NDArray[np.intp],
        bad: NDArray[np.bool_],
        sample_ids: NDArray[np.int64],
        problem: str,
    ) -> None:
        if bad.any():
            line, place = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
            column = int(columns[place])
            raise BadDataError(
                f"{self.where(int(sample_ids[line]))}: column {COLUMNS[column]} (field {column + 1}): "
                f"{fields.show(line, column)} {problem}: mend or remove the line"
            )

    def _refuse_count(self, sample_id: int, count: int) -> NoReturn:
        mend = "mend or remove the line"
        if count < len(COLUMNS):
            mend += ", or set data.lenient: true to take lines that lost their trailing empty fields as if padded"
        raise BadDataError(
            f"{self.where(sample_id)}: {count} fields, expected {len(COLUMNS)} (label, I1 to I13, C1 to C26, "
            f"separated by tabs): {mend}"
        )
