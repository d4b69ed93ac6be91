"""Bags picked and split, and what comes from other ranks checked on arrival."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlrm_api.errors import InvalidSpecError, TemporaryError
from dlrm_api.training import CommunicationSpec, InterNodeSpec, RowOptimizerSpec
from dlrm_testing.trainer.gangs import hand_plan, small_job
from dlrm_testing.unique_tables import spec_with_unique
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import EmbeddingOptions, place
from dlrm_trainer.embedding.exchange import Exchange, formats_of, pick_segments

OPTIONS = EmbeddingOptions(optimizer=RowOptimizerSpec(), seed=0, global_batch_size=4, tier_dir=None)
TABLES = [{"name": "t", "rows": 10, "dim": 8, "maxLookups": 3}]


@given(st.lists(st.integers(0, 6), max_size=20), st.randoms(use_true_random=False))
def test_picking_segments_equals_joining_slices(lengths: list[int], shuffler: Any) -> None:
    values = torch.arange(sum(lengths))
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    order = list(range(len(lengths)))
    shuffler.shuffle(order)

    picked = pick_segments(values, starts[order], sizes[order])

    expected = [int(value) for number in order for value in values[starts[number] : starts[number] + sizes[number]]]
    assert picked.tolist() == expected


def test_messages_have_the_formats_of_the_link_to_their_rank() -> None:
    communication = CommunicationSpec(forward="bf16", inter_node=InterNodeSpec(forward="int8", backward="fp16"))
    options = replace(OPTIONS, communication=communication, ranks_per_node=2)

    forward, backward = formats_of(options, rank=2, world_size=6)

    assert forward.codecs == ("int8", "int8", "bf16", "bf16", "int8", "int8")
    assert backward.codecs == ("fp16", "fp16", "fp32", "fp32", "fp16", "fp16")


def test_a_plan_without_the_formats_that_it_should_choose_is_refused() -> None:
    options = replace(OPTIONS, communication=CommunicationSpec(backward="auto"))

    with pytest.raises(InvalidSpecError) as refusal:
        formats_of(options, rank=0, world_size=2)

    assert refusal.value.path == "plan.rowCodecs"


class TwoRanks:
    """Collectives of rank 0 with a peer that sends what a test gives it."""

    rank, world_size = 0, 2

    def __init__(
        self, header: list[int], lengths: list[int], ids: list[int], id_type: torch.dtype = torch.int32
    ) -> None:
        self._sent = iter(
            (torch.tensor(header), torch.tensor(lengths, dtype=torch.uint8), torch.tensor(ids, dtype=id_type))
        )

    def all_to_all(self, what: str, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return torch.cat([tensor[: sent[0]], next(self._sent)])


def exchange_with(folder: Path, peer: TwoRanks) -> Exchange:
    job = small_job(folder, 2, model={"tables": TABLES})
    placement, collectives = place(job.spec.model, hand_plan(job, [0]), 2), cast(Collectives, peer)
    return Exchange(placement, collectives, collectives, OPTIONS)


def one_sample() -> Batch:
    return Batch(
        number=0,
        sample_ids=torch.arange(1),
        dense=torch.zeros(1, 0),
        labels=torch.zeros(1),
        lengths=torch.tensor([[2]], dtype=torch.int32),
        values=torch.tensor([4, 9]),
    )


def test_bags_of_all_ranks_are_joined_in_order(tmp_path: Path) -> None:
    exchange = exchange_with(tmp_path, TwoRanks([2, 3], [1, 2], [0, 5, 9]))

    owned = exchange.send_ids(one_sample())

    assert owned.bags.lengths.tolist() == [[2, 1, 2]]
    assert owned.bags.ids.tolist() == [4, 9, 0, 5, 9]
    assert owned.travel.samples.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("header", "lengths", "ids"),
    [
        pytest.param([2, 3], [1, 2], [0, 5, 10], id="row beyond the table"),
        pytest.param([2, 3], [1, 2], [0, -1, 9], id="negative row"),
        pytest.param([2, 3], [1, 3], [0, 5, 9], id="lengths beyond the ids"),
        pytest.param([2, 3], [1, 1], [0, 5, 9], id="lengths short of the ids"),
        pytest.param([2, 7], [3, 4], [0] * 7, id="more ids than bags may hold"),
        pytest.param([-1, 0], [], [], id="negative number of samples"),
        pytest.param([1, -1], [1], [], id="negative number of ids"),
    ],
)
def test_impossible_bags_of_a_peer_are_refused(
    tmp_path: Path, header: list[int], lengths: list[int], ids: list[int]
) -> None:
    exchange = exchange_with(tmp_path, TwoRanks(header, lengths, ids))

    with pytest.raises(TemporaryError, match="rank 1 sent"):
        exchange.send_ids(one_sample())


def keyed_exchange(folder: Path, peer: TwoRanks) -> Exchange:
    """Rank 0 has the first of two buckets of table t."""
    job = small_job(folder, 2, model={"tables": TABLES})
    spec = spec_with_unique(job.spec, {"t": 2})
    plan = hand_plan(job, [0])
    whole = plan.tables[0].shards[0]
    halves = tuple(
        whole.model_copy(update={"kind": "row", "rank": rank, "row_start": rank, "row_end": rank + 1})
        for rank in (0, 1)
    )
    table = plan.tables[0].model_copy(update={"buckets": 2, "ranges": halves})
    placement = place(spec.model, plan.model_copy(update={"tables": (table,)}), 2)
    collectives = cast(Collectives, peer)
    return Exchange(placement, collectives, collectives, OPTIONS)


def test_keys_travel_whole_and_are_routed_by_range(tmp_path: Path) -> None:
    first, last = 0, 2**62 - 1
    exchange = keyed_exchange(tmp_path, TwoRanks([1, 2], [2], [first, last], torch.int64))
    batch = replace(one_sample(), values=torch.tensor([2**62, 7]))

    owned = exchange.send_ids(batch)

    assert owned.bags.lengths.tolist() == [[1, 2]]
    assert owned.bags.ids.tolist() == [7, first, last]


@pytest.mark.parametrize("key", [2**62, 2**63 - 1, -1])
def test_a_key_of_another_range_names_table_and_rank(tmp_path: Path, key: int) -> None:
    exchange = keyed_exchange(tmp_path, TwoRanks([1, 1], [1], [key], torch.int64))

    with pytest.raises(TemporaryError, match=f"rank 1 sent key {key} of table t"):
        exchange.send_ids(one_sample())
