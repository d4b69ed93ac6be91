"""A table's rows as one file, written block by block."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError
from dlrm_checkpointer.reading.precision import Precision
from dlrm_checkpointer.types import TableMeta

HEADER_ALIGNMENT = 8
COPIED_BYTES = 16 << 20
DTYPES = {"uint8": "U8", "float16": "F16", "float32": "F32", "int64": "I64", "uint16": "BF16"}
"""safetensors' names of numpy's types; 16-bit words are those of bf16."""


class TableFile(Protocol):
    """Takes a table's rows in ascending order."""

    def add(self, row_ids: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Some rows more: their numbers and what ``precision.at_precision`` made of them."""
        ...

    def close(self) -> None:
        """The rows are all there: finish the file."""
        ...


class TableFormat(Protocol):
    """A kind of file for tables."""

    name: str
    suffix: str

    def check(self, precision: Precision) -> None:
        """Refuse a precision that files of this kind don't know.

        Raises:
            UsageError: it is none of theirs; says which are.
        """
        ...

    def open(self, path: Path, table: TableMeta, precision: Precision, *, all_rows: bool) -> TableFile:
        """A new file; ``all_rows``: every row of the table will come."""
        ...


class Safetensors:
    """safetensors files: arrays side by side, the rows of each in ascending order.

    Row numbers are in ``row_ids`` (N,) int64, and left out where all rows are there.
    """

    name = "safetensors"
    suffix = ".safetensors"

    def check(self, precision: Precision) -> None:
        """Every precision has its type."""

    def open(self, path: Path, table: TableMeta, precision: Precision, *, all_rows: bool) -> TableFile:  # noqa: ARG002
        """A new file. Unless all rows come, each array is in a file of its own beside it until the rows are there."""
        return _WholeTable(path, table.rows) if all_rows else _SomeRows(path)


class _WholeTable:
    """A file whose rows are counted: every block goes where it belongs."""

    def __init__(self, path: Path, rows: int) -> None:
        self._path, self._rows, self._done = path, rows, 0
        self._starts: dict[str, int] = {}

    def add(self, row_ids: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        if not self._starts:
            self._begin(arrays)
        with self._path.open("r+b") as file:
            for name, array in arrays.items():
                row = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
                file.seek(self._starts[name] + self._done * row)
                file.write(little_endian(array))
        self._done += len(row_ids)

    def _begin(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        layout = _layout(arrays, self._rows)
        header = safetensors_header(layout)
        check_room(self._path, len(header) + sum(_bytes(each) for each in layout.values()))
        self._path.write_bytes(header)
        end = len(header)
        for name, (dtype, shape) in layout.items():
            self._starts[name], end = end, end + _bytes((dtype, shape))

    def close(self) -> None:
        """Every row is where it belongs already."""


class _SomeRows:
    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, 0
        self._arrays: dict[str, NDArray[Any]] = {}
        """Empty ones, which tell type and shape."""

    def add(self, row_ids: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, array in {"row_ids": row_ids, **arrays}.items():
            self._arrays.setdefault(name, array[:0])
            with self._draft(name).open("ab") as file:
                file.write(little_endian(array))
        self._rows += len(row_ids)

    def close(self) -> None:
        layout = _layout(self._arrays, self._rows)
        with self._path.open("xb") as file:
            file.write(safetensors_header(layout))
            for name in layout:
                with self._draft(name).open("rb") as draft:
                    shutil.copyfileobj(draft, file, COPIED_BYTES)
                self._draft(name).unlink()

    def _draft(self, name: str) -> Path:
        return self._path.with_name(f".{self._path.name}.{name}")


Layout = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


def check_room(path: Path, size: int) -> None:
    """Refuse to begin a file that its disk has no room for: a table's rows may be claimed by trillions.

    Raises:
        DeviceError: names the file, its bytes and those that are free.
    """
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise DeviceError(f"{path}: takes {size} bytes, and {free} are free there: free space, or give another folder")


def _bytes(array: tuple[np.dtype[Any], tuple[int, ...]]) -> int:
    dtype, shape = array
    return dtype.itemsize * math.prod(shape)


def _layout(arrays: Mapping[str, NDArray[Any]], rows: int) -> Layout:
    """Types and shapes with so many rows, types of more bytes first: each array begins where its type may."""
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    return {name: (arrays[name].dtype, (rows, *arrays[name].shape[1:])) for name in names}


def safetensors_header(arrays: Layout) -> bytes:
    """The first bytes of a file that holds these arrays in their order: type and shape of each."""
    entries, end = {}, 0
    for name, (dtype, shape) in arrays.items():
        begin, end = end, end + _bytes((dtype, shape))
        entries[name] = {"dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def little_endian(array: NDArray[Any]) -> memoryview:
    """An array's bytes, row by row."""
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data
