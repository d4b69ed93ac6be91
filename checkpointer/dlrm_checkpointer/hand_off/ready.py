"""What waits in the hand-off folder for the sidecar: a rank's cut or a slice of one, and how far it is on its way."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dlrm_api.checkpoint import Bits
from dlrm_checkpointer.cut import CutMeta, ShardId, ShardRows, SnapshotName
from dlrm_checkpointer.format.manifest import ChunkEntry
from dlrm_checkpointer.hand_off.folder import CutName, SliceName


@dataclass(frozen=True, kw_only=True)
class ReadyCut:
    """One rank's whole cut, or one slice of it; its arrays are views of mapped memory, gone with ``Inbox.free``."""

    name: CutName | SliceName
    meta: CutMeta
    number: int
    """Slices of the cut before this one."""
    nbytes: int
    index: dict[str, Any]
    data: memoryview

    @property
    def owned(self) -> list[ShardId]:
        """All that the rank stores, also what has no row here."""
        return [ShardId(**shard) for shard in self.index["owned"]]

    def pieces(self) -> Iterator[ShardRows]:
        """The rows, in the order in which the rank gave them."""
        for piece in self.index["pieces"]:
            shard, count, state = ShardId(**piece["shard"]), piece["rows"], piece["stateColumns"]
            rows_at = piece["rowsOffset"]
            rows_end = rows_at + 4 * count * shard.width
            yield ShardRows(
                shard=shard,
                row_ids=np.frombuffer(self.data, "<i8", count, piece["offset"]),
                rows=np.frombuffer(self.data, "<f4", count * shard.width, rows_at).reshape(count, shard.width),
                state=np.frombuffer(self.data, "<f4", count * state, rows_end).reshape(count, state),
            )

    def dense(self) -> dict[str, NDArray[Any]] | None:
        """The dense state, where this rank gave it."""
        if self.index["dense"] is None:
            return None
        arrays = {}
        for entry in self.index["dense"]:
            count = int(np.prod(entry["shape"], dtype=np.int64))
            dtype = np.dtype(entry["dtype"]).newbyteorder("<")
            array = np.frombuffer(self.data, dtype, count, entry["offset"]) if count else np.empty(0, dtype)
            arrays[entry["name"]] = array.reshape(entry["shape"])
        return arrays


class Durable(BaseModel):
    """What is durable already of a cut that comes in slices."""

    model_config = ConfigDict(frozen=True)

    slices: int = 0
    chunks: tuple[ChunkEntry, ...] = ()
    bits: Bits | None = None
    """Of these chunks, and so of the whole cut; None where there are none."""

    def pack(self) -> str:
        """As text, a sixth of the JSON: it grows with the cut and lies in the memory that the ranks share."""
        return base64.b85encode(zlib.compress(self.model_dump_json().encode())).decode()

    @classmethod
    def unpack(cls, text: str) -> Self:
        """Read ``pack``'s form."""
        return cls.model_validate_json(zlib.decompress(base64.b85decode(text)))


@dataclass(frozen=True)
class UploadedCut:
    """A cut whose local parts are durable."""

    step: int
    attempt: int
    world_size: int
    time: float
    """When a rank handed it over (Unix seconds)."""
    parent: SnapshotName | None = None
    """See ``CutMeta``."""

    @property
    def snapshot(self) -> SnapshotName:
        """What it is to become."""
        return SnapshotName(self.step, self.attempt)
