"""Plans in ConfigMaps are read back as written; damaged or foreign parts are refused."""

import gzip
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from dlrm_api import plan as plan_module
from dlrm_api.errors import InvalidSpecError
from dlrm_api.plan import (
    MAX_PLAN_BYTES,
    Plan,
    RankPlan,
    ShardRange,
    TablePlan,
    parse_plan,
    plan_from_parts,
    plan_to_parts,
    plan_without_tables,
)
from dlrm_operator.reconcile.state import Children, ConfigMapSeen
from dlrm_trainer.__main__ import read_plan

TRAP = '],"lookahead":9 "tables":['
"""Words that look like the text around the tables."""


def a_plan(shards: int = 3) -> Plan:
    rows = (
        ShardRange(rank=0, kind="row", row_start=i, row_end=i + 1, column_start=0, column_end=4) for i in range(shards)
    )
    return Plan(
        world_size=1,
        processes_per_node=1,
        hardware=TRAP,
        ranks=(RankPlan(rank=0, node=0, bytes_per_tier={"ddr": 1}),),
        tables=(TablePlan(name="a", column_blocks=(0, 4), ranges=tuple(rows)),),
        lookahead=2,
        handoff_bytes=(7,),
        reasons=(TRAP,),
    )


def parts_of(body: bytes) -> dict[str, bytes]:
    """Parts with the right digest, as a forger writes them."""
    return {f"plan.{hashlib.sha256(body).hexdigest()[:16]}.0-of-1.gz": body}


def test_without_its_tables_a_plan_is_the_same_whatever_words_it_holds() -> None:
    parts = plan_to_parts(a_plan())

    assert plan_from_parts(parts) == a_plan()
    assert plan_without_tables(parts) == a_plan().model_copy(update={"tables": ()})


GOOD = gzip.compress(a_plan().model_dump_json().encode(), mtime=0)
BOMB = gzip.compress(b" " * (2 * MAX_PLAN_BYTES), mtime=0)
DAMAGED: dict[str, dict[str, bytes]] = {
    "bomb": parts_of(BOMB),
    "not gzip": parts_of(b"not gzip"),
    "flipped byte": parts_of(GOOD[:40] + bytes([GOOD[40] ^ 255]) + GOOD[41:]),
    "truncated": parts_of(GOOD[:-20]),
    "unexpected key": {"plan.x.gz": GOOD},
    "not a plan": parts_of(gzip.compress(b"{}")),
}


def of_operator(parts: dict[str, bytes], _: Path) -> None:
    plan_without_tables(parts)


def of_trainer(parts: dict[str, bytes], folder: Path) -> None:
    for name, body in parts.items():
        (folder / name).write_bytes(body)
    read_plan(folder)


@pytest.mark.parametrize("read", [of_operator, of_trainer])
@pytest.mark.parametrize("parts", DAMAGED.values(), ids=DAMAGED)
def test_damaged_plan_is_rejected_in_bounded_memory(
    parts: dict[str, bytes], read: Callable[[dict[str, bytes], Path], None], tmp_path: Path
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidSpecError, match="plan"):
            read(parts, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 3 * MAX_PLAN_BYTES


@pytest.mark.parametrize("parts", DAMAGED.values(), ids=DAMAGED)
def test_operator_replans_a_damaged_plan(parts: dict[str, bytes]) -> None:
    seen = ConfigMapSeen(name="x-plan-1", uid="c", attempt=1, parts=parts, text={})

    assert Children(config_maps=(seen,)).plan(1) is None


def test_a_plan_that_could_not_be_read_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(a_plan(100).model_dump_json())

    monkeypatch.setattr(plan_module, "MAX_PLAN_BYTES", size)
    assert plan_from_parts(plan_to_parts(a_plan(100))) == a_plan(100)
    monkeypatch.setattr(plan_module, "MAX_PLAN_BYTES", size - 1)
    with pytest.raises(InvalidSpecError, match=rf"100 ranges .*{size}.*{size - 1}"):
        plan_to_parts(a_plan(100))


def test_a_plan_of_bad_entries_alone_makes_one_error() -> None:
    document = {**a_plan().model_dump(mode="json"), "tables": [1] * 1_000, "ranks": [{}] * 1_000}
    with pytest.raises(InvalidSpecError) as refused:
        parse_plan(json.dumps(document))

    assert isinstance(refused.value.__cause__, ValidationError)
    assert refused.value.__cause__.error_count() < 10


def test_a_plan_whose_summary_is_too_large_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = plan_to_parts(a_plan())
    monkeypatch.setattr(plan_module, "MAX_SUMMARY_BYTES", 10)

    with pytest.raises(InvalidSpecError, match="without its tables, the limit is 10"):
        plan_without_tables(parts)
