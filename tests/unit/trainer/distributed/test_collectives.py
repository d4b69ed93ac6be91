"""Values between ranks: typed on both sides, and nothing that a peer sends is run."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from dlrm_api.errors import TemporaryError
from dlrm_api.progress import EvalMetrics
from dlrm_checkpointer import ObjectEntry
from dlrm_checkpointer.read.restore import PartialCut
from dlrm_checkpointer.types import SnapshotName
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_trainer.checkpointing.data_set import TEXT
from dlrm_trainer.checkpointing.handover import BEGUN
from dlrm_trainer.checkpointing.restore import CHOSEN, PARTIALS, SHARE, START, Start
from dlrm_trainer.distributed import collectives
from dlrm_trainer.distributed.collectives import MAX_GATHERED_BYTES, Collectives, decode_value, encode_value
from dlrm_trainer.embedding.unique import NO_PARENT
from dlrm_trainer.evaluate import QUALITY
from dlrm_trainer.learner import VALUE_AND_PLACE

NAME = SnapshotName(40, 2)
KINDS: list[tuple[TypeAdapter[Any], Any]] = [
    (VALUE_AND_PLACE, (math.inf, "table Ünï, row 7")),
    (QUALITY, None),
    (QUALITY, EvalMetrics(step=3, samples=10, log_loss=0.5)),
    (BEGUN, ((NAME, 1763801800.25), None, 0)),
    (BEGUN, ((None, 1763801800.25), NAME, NO_PARENT)),
    (BEGUN, (None, NAME, 40)),
    (START, Start(attempt=3, snapshot=NAME, reasons=("a", "b"), salvage=PartialCut(NAME, (0, 2)))),
    (START, Start(attempt=3, snapshot=None, reasons=())),
    (PARTIALS, {"users": (2**64 - 1, 0, 1, 2)}),
    (TEXT, "data.files[3]: \udcff is no UTF-8"),
    (CHOSEN, (None, ["why"])),
    (SHARE, (ObjectEntry(key=f"chunks/{1:016}/{2:08}/{3:06}/t.safetensors", bytes=3, sha256="ab" * 32),)),
    (SHARE, None),
]


@pytest.mark.parametrize(("kind", "value"), KINDS, ids=repr)
def test_a_value_comes_as_it_was_sent(kind: TypeAdapter[Any], value: Any) -> None:
    found = decode_value(encode_value(value, kind), kind, 1)

    assert found == value
    assert type(found) is type(value)


class Runs:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"\x80\x05.", "invalid JSON"),
        (b"", "invalid JSON"),
        (b"[" * 200_000, "invalid JSON"),
        (b"1" * 5_000, "invalid JSON"),
        (b"[1, 2, 3]", "mapping"),
        (b'{"users": ["x"]}', "integer"),
    ],
)
def test_what_is_no_such_value_is_refused_by_the_rank_that_sent_it(body: bytes, problem: str) -> None:
    with pytest.raises(TemporaryError, match=f"invalid value from rank 5: .*{problem}"):
        decode_value(body, PARTIALS, 5)


def said_by(collectives: Collectives, bodies: list[bytes], of_rank_0: bool) -> str:
    """Gather the values of ranks that send these bodies."""
    from dlrm_trainer.distributed import collectives as module

    module.encode_value = lambda _value, _kind: bodies[collectives.rank]  # type: ignore[assignment]
    kind = TypeAdapter(list[int])
    try:
        if of_rank_0:
            collectives.broadcast([] if collectives.rank == 0 else None, kind)
        else:
            collectives.gather([], kind)
    except TemporaryError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_peer_s_pickle_runs_nothing_and_every_rank_names_the_peer(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    body = pickle.dumps(Runs(ran))

    said = run_ranks(3, said_by, [b"[]", body, b"[]"], False)
    at_others = run_ranks(2, said_by, [body, b""], True)[1]

    assert all(words.startswith("invalid value from rank 1: invalid JSON") for words in said)
    assert at_others.startswith("invalid value from rank 0: invalid JSON")
    assert not ran.exists()


@pytest.mark.slow
def test_a_value_that_is_too_long_is_refused_before_memory_is_taken_for_it() -> None:
    said = run_ranks(2, said_by, [b"[]", b" " * (MAX_GATHERED_BYTES + 1)], False)

    assert all("invalid value from rank 1" in words and f"got {MAX_GATHERED_BYTES + 1}" in words for words in said)


@pytest.mark.parametrize("size", [-1, 0, MAX_GATHERED_BYTES + 1, 2**63 - 1])
def test_no_value_has_such_a_length(size: int) -> None:
    with pytest.raises(TemporaryError, match=f"expected 1 to {MAX_GATHERED_BYTES} bytes, got {size}"):
        collectives.check_size(size, MAX_GATHERED_BYTES, 0)
