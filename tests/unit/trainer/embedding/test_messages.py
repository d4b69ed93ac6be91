"""Messages of pooled rows and gradients: the compiled loops and torch's operations lay out and read the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlrm_api.errors import DivergedError
from dlrm_api.wire import Codec
from dlrm_testing.trainer.host_waits import HostWaits
from dlrm_testing.trainer.shardings import random_model, random_plan
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding import messages as messages_
from dlrm_trainer.embedding import place
from dlrm_trainer.embedding.messages import DevicePacking, Formats, HostPacking, Outgoing, Packing, Travel, TravelFinder
from dlrm_trainer.embedding.placement import Routes, routes

CODECS: tuple[Codec, ...] = "fp32", "fp16", "bf16", "int8"


class SimulatedRanks:
    """The routes, bags, pooled rows and gradients of all ranks of a random model and plan."""

    def __init__(self, seed: int, ranks: int, scale: float = 1.0) -> None:
        generator = np.random.default_rng(seed)
        model = random_model(generator, int(generator.integers(1, 6)))
        placement = place(model, random_plan(generator, model, ranks), ranks)
        self.routes: list[Routes] = [routes(placement, rank) for rank in range(ranks)]
        samples = generator.integers(0, 6, ranks).tolist()
        units = 1 + max(
            [
                len(placement.features) - 1,
                *(unit for each in self.routes for group in each.groups for one in group for unit in one.split_units),
            ]
        )
        lengths = [torch.from_numpy(generator.integers(0, 3, (units, count)).astype(np.int32)) for count in samples]
        every = torch.cat(lengths, dim=1)

        def values(*shape: int) -> Tensor:
            spread = generator.normal(0, scale, shape) * 2.0 ** generator.integers(-30, 4, shape)
            return torch.from_numpy(spread.astype(np.float32))

        self.travels: list[Travel] = []
        self.pooled: list[list[Tensor]] = []
        self.replicated: list[list[Tensor]] = []
        self.gradients: list[Tensor] = []
        for rank, table in enumerate(self.routes):
            # Whole columns always travel: any unit will do.
            of_columns = [
                unit for group in table.groups[rank] for unit in ([0] * group.whole + group.split_units.tolist())
            ]
            self.travels.append(TravelFinder(table, rank).find(lengths[rank], every[of_columns], samples))
            total = sum(samples)
            self.pooled.append([values(total, group.columns * group.width) for group in table.groups[rank]])
            self.replicated.append([values(samples[rank], group.columns * group.width) for group in table.replicated])
            self.gradients.append(values(samples[rank], table.width))

    def packings(self, make: Callable[[Routes, int], Packing]) -> list[Packing]:
        return [make(table, rank) for rank, table in enumerate(self.routes)]


def exchanged(sent: Sequence[Outgoing]) -> list[Tensor]:
    """What each rank receives."""
    parts = [torch.split(each.message, each.sent) for each in sent]
    for rank, each in enumerate(sent):
        assert [len(part[rank]) for part in parts] == each.received
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(sent))]


def on_host(table: Routes, rank: int) -> Packing:
    return HostPacking(table, rank)


def by_torch(table: Routes, rank: int) -> Packing:
    return DevicePacking(table, rank, HOST)


def assert_equal_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    codecs=st.integers(1, 5).flatmap(lambda ranks: st.lists(st.sampled_from(CODECS), min_size=ranks, max_size=ranks)),
    by_link=st.booleans(),
    units=st.booleans(),
)
def test_compiled_and_torch_messages_are_equal_bit_for_bit(
    seed: int, codecs: list[Codec], by_link: bool, units: bool
) -> None:
    ranks = len(codecs)
    gang = SimulatedRanks(seed, ranks, scale=float(10.0 ** (seed % 9 - 4)))
    ours, theirs = gang.packings(on_host), gang.packings(by_torch)
    # A link has one format, whichever of its ranks sends.
    formats = [
        Formats(tuple(codecs[(rank + peer) % ranks * by_link] for peer in range(ranks))) for rank in range(ranks)
    ]
    with pytest.MonkeyPatch.context() as patch:
        if units:
            patch.setattr(messages_, "UNIT_FLOATS", 8)
        sides = []
        for packings in (ours, theirs):
            all_ranks = list(zip(packings, gang.pooled, gang.replicated, gang.gradients, gang.travels, strict=True))
            sent = [
                each.pack_pooled(form, pooled, travel)
                for form, (each, pooled, _, _, travel) in zip(formats, all_ranks, strict=True)
            ]
            features = [
                each.unpack_pooled(form, came, pooled, replicated, travel)
                for form, (each, pooled, replicated, _, travel), came in zip(
                    formats, all_ranks, exchanged(sent), strict=True
                )
            ]
            back = [
                each.pack_gradients(form, gradient, travel, 64.0)
                for form, (each, _, _, gradient, travel) in zip(formats, all_ranks, strict=True)
            ]
            gradients = [
                each.unpack_gradients(form, came, gradient, travel)
                for form, (each, _, _, gradient, travel), came in zip(formats, all_ranks, exchanged(back), strict=True)
            ]
            replicas = [each.replicated_gradients(gradient) for each, _, _, gradient, _ in all_ranks]
            sides.append((sent, features, back, gradients, replicas))

    for mine, other in zip(*((*side[0], *side[2]) for side in sides), strict=True):
        assert torch.equal(mine.message, other.message)
        assert mine[1:] == other[1:]
    for mine_, other_ in zip(sides[0][1], sides[1][1], strict=True):
        assert_equal_bits(mine_, other_)
    for kind in (3, 4):
        for mine_rank, other_rank in zip(sides[0][kind], sides[1][kind], strict=True):
            for mine_, other_ in zip(mine_rank, other_rank, strict=True):
                assert_equal_bits(mine_, other_)


@pytest.mark.parametrize("make", [on_host, by_torch])
def test_a_value_that_fp16_cannot_send_is_known_to_both_sides(make: Callable[[Routes, int], Packing]) -> None:
    seed = next(
        seed
        for seed in range(100)
        if all(len(gradient) and gradient.numel() for gradient in SimulatedRanks(seed, 2).gradients)
        and SimulatedRanks(seed, 2).routes[0].groups[1]
    )
    gang = SimulatedRanks(seed, 2)
    packings = gang.packings(make)
    gang.gradients[0].fill_(float("inf"))
    fp16 = Formats(("fp16",) * 2)

    sent = [
        each.pack_gradients(fp16, gradient, travel, 1.0)
        for each, gradient, travel in zip(packings, gang.gradients, gang.travels, strict=True)
    ]

    assert [each.finite for each in sent] == [False, True]
    with pytest.raises(DivergedError, match="rank 0 sent values that are not finite"):
        packings[1].unpack_gradients(fp16, exchanged(sent)[1], gang.gradients[1], gang.travels[1])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("ranks", [2, 5])
def test_the_host_waits_at_most_once_for_messages_from_all_ranks(codec: Codec, ranks: int) -> None:
    gang = SimulatedRanks(3, ranks)
    packings, formats = gang.packings(by_torch), Formats((codec,) * ranks)
    packed = zip(packings, gang.gradients, gang.travels, strict=True)

    with HostWaits() as packing:
        sent = [each.pack_gradients(formats, gradient, travel, 1.0) for each, gradient, travel in packed]
    came = exchanged(sent)[0]
    with HostWaits() as unpacking:
        packings[0].unpack_gradients(formats, came, gang.gradients[0], gang.travels[0])

    assert len(came)
    assert packing.count == 0
    assert unpacking.count == 1
