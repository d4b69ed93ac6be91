"""Messages that kernels pack and unpack: those of the compiled loops, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dlrm_api.wire import Codec
from dlrm_testing.trainer.host_waits import HostWaits
from dlrm_testing.trainer.live_memory import takes_unpromised_memory
from dlrm_testing.trainer.message_reference import SimulatedRanks
from dlrm_testing.trainer.shardings import random_model, whole_plan
from dlrm_testing.trainer.triton_programs import ORDERS, counted_launches, memory_in_place, program_order
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding import place
from dlrm_trainer.embedding.gpu import message_packing
from dlrm_trainer.embedding.gpu.message_packing import DevicePacking
from dlrm_trainer.embedding.messages import Formats, HostPacking, Packing, TravelFinder
from dlrm_trainer.embedding.placement import Routes, routes
from dlrm_trainer.embedding.tiers.slots import untouched_zeros

CODECS: tuple[Codec, ...] = "fp32", "fp16", "bf16", "int8"
SPECIAL = [0.0, -0.0, 2.0**-149, -(2.0**-126), 65_504.0, -65_520.0, 1e30, 3e38]
NOT_FINITE = [np.inf, -np.inf, np.nan]


def on_gpu(table: Routes, rank: int) -> Packing:
    return DevicePacking(table, rank, HOST)


def by_link(codecs: Sequence[Codec]) -> list[Formats]:
    """Formats by pair of ranks: a link has one, whichever of its ranks sends."""
    ranks = range(len(codecs))
    return [Formats(tuple(codecs[(rank + peer) % len(codecs)] for peer in ranks)) for rank in ranks]


@pytest.mark.parametrize(
    ("seed", "codecs"),
    [
        (0, ["fp32", "fp16", "int8"]),
        (7, ["fp16", "bf16"]),
        (11, ["int8", "fp16", "fp16"]),
        (12, ["bf16", "int8", "fp32"]),
        (17, ["fp32"]),
    ],
)
def test_messages_and_vectors_are_those_of_the_host(seed: int, codecs: list[Codec]) -> None:
    gang, formats = SimulatedRanks(seed, len(codecs), scale=10.0 ** (seed % 9 - 4), most=3), by_link(codecs)

    ours, theirs = (gang.exchange(make, formats) for make in (on_gpu, HostPacking))

    assert ours.bits() == theirs.bits()


@pytest.mark.parametrize("order", ORDERS)
def test_bits_do_not_depend_on_the_order_of_programs(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several programs a piece.
    monkeypatch.setattr(message_packing, "TILE", 64)
    gang, formats = SimulatedRanks(21, 2, most=4), by_link(["int8", "fp16"])

    with program_order(ORDERS[order]):
        ours = gang.exchange(on_gpu, formats)

    assert ours.bits() == gang.exchange(HostPacking, formats).bits()


@pytest.mark.parametrize(("dim", "codec"), [(4, "int8"), (256, "fp16"), (1_024, "int8"), (1_028, "bf16")])
def test_vectors_of_any_width_are_those_of_the_host(dim: int, codec: Codec) -> None:
    gang, formats = SimulatedRanks(3, 2, dim=dim, most=2), by_link([codec, codec])

    ours, theirs = (gang.exchange(make, formats) for make in (on_gpu, HostPacking))

    assert ours.bits() == theirs.bits()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not finite"])
def test_numbers_of_every_class_travel_as_from_the_host(codec: Codec, bad: bool) -> None:
    formats, gangs = by_link([codec, codec]), (SimulatedRanks(seed, 2, dim=16, most=2) for seed in range(100))
    gang = next(each for each in gangs if all(map(len, each.gradients)) and all(each.pooled))
    values = torch.tensor([*SPECIAL, *(NOT_FINITE if bad and codec != "fp16" else [])])
    for each in (*gang.gradients, *(rows for pooled in gang.pooled for rows in pooled)):
        flat = each.view(-1)
        flat[::3] = values.repeat(len(flat))[: len(flat[::3])]
        flat[1::7] = -0.0
        if bad and codec == "fp16":
            flat[:1] = np.inf

    ours, theirs = (gang.exchange(make, formats) for make in (on_gpu, HostPacking))

    assert [bool(each.check.isnan()) for each in ours.sent] == [bool(each.check.isnan()) for each in theirs.sent]
    assert any(bool(each.check.isnan()) for each in ours.sent) == (bad and codec == "fp16")
    if not (bad and codec == "fp16"):
        assert [each.message.tolist() for each in ours.sent] == [each.message.tolist() for each in theirs.sent]
    for mine, other in zip(ours.vectors, theirs.vectors, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())


def test_launches_do_not_grow_with_ranks_and_the_host_waits_for_nothing() -> None:
    counts = []
    for ranks in (2, 4):
        gang = SimulatedRanks(1, ranks, most=1)
        with counted_launches() as launched, HostWaits() as waits:
            gang.exchange(on_gpu, by_link(["fp16"] * ranks))
        counts.append({name: launched.count(name) / ranks for name in launched})
        assert waits.count == 0

    assert all(
        launches <= {"unpack": 3, "sum_parts": 1}.get(name, 2) for each in counts for name, launches in each.items()
    )


@takes_unpromised_memory
def test_rows_past_2_to_the_31_elements_are_packed_and_unpacked() -> None:
    dim, samples = 1_024, [2**21, 2]
    model = random_model(np.random.default_rng(0), 1, dim=dim)
    tables = [routes(place(model, whole_plan(model, owner, 2), 2), owner) for owner in (0, 1)]
    fp32, columns = Formats(("fp32", "fp32")), len(tables[0].groups[0][0].starts)
    rows = torch.from_numpy(untouched_zeros(sum(samples) * columns * dim, np.float32)).view(sum(samples), -1)
    rows[-2:] = torch.arange(2.0)[:, None] + 1
    lengths = torch.zeros(0, sum(samples), dtype=torch.int32)

    with memory_in_place():
        packings = [DevicePacking(table, rank, HOST) for rank, table in enumerate(tables)]
        travels = [
            TravelFinder(table, rank).find(lengths[:, : samples[rank]], lengths, samples)
            for rank, table in enumerate(tables)
        ]
        sent = packings[0].pack_pooled(fp32, [rows], travels[0])
        features = packings[1].unpack_pooled(fp32, torch.empty(0, dtype=torch.uint8), [rows], [], travels[1])

    assert sent.message.view(torch.float32).view(2, -1).tolist() == rows[-2:].tolist()
    assert features.tolist() == rows[-2:].tolist()
