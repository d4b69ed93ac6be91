"""Messages of pooled rows and gradients: the compiled loops lay out and read the bytes that torch's operations do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.wire import Codec
from dlrm_testing.trainer.message_reference import ReferencePacking, SimulatedRanks, exchanged
from dlrm_trainer.embedding import messages as messages_
from dlrm_trainer.embedding.messages import Formats, HostPacking, Packing
from dlrm_trainer.embedding.placement import Routes

CODECS: tuple[Codec, ...] = "fp32", "fp16", "bf16", "int8"


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    codecs=st.integers(1, 5).flatmap(lambda ranks: st.lists(st.sampled_from(CODECS), min_size=ranks, max_size=ranks)),
    by_link=st.booleans(),
    units=st.booleans(),
)
def test_compiled_messages_are_those_of_torch_bit_for_bit(
    seed: int, codecs: list[Codec], by_link: bool, units: bool
) -> None:
    ranks = len(codecs)
    gang = SimulatedRanks(seed, ranks, scale=float(10.0 ** (seed % 9 - 4)))
    # A link has one format, whichever of its ranks sends.
    formats = [
        Formats(tuple(codecs[(rank + peer) % ranks * by_link] for peer in range(ranks))) for rank in range(ranks)
    ]
    with pytest.MonkeyPatch.context() as patch:
        if units:
            patch.setattr(messages_, "UNIT_FLOATS", 8)
        ours, theirs = (gang.exchange(make, formats) for make in (HostPacking, ReferencePacking))

    assert ours.bits() == theirs.bits()


@pytest.mark.parametrize("make", [HostPacking, ReferencePacking])
def test_a_value_that_fp16_cannot_send_is_known_to_both_sides(make: Callable[[Routes, int], Packing]) -> None:
    seed = next(
        seed
        for seed in range(100)
        if all(len(gradient) and gradient.numel() for gradient in SimulatedRanks(seed, 2).gradients)
        and SimulatedRanks(seed, 2).routes[0].groups[1]
    )
    gang = SimulatedRanks(seed, 2)
    gang.gradients[0].fill_(float("inf"))
    fp16 = Formats(("fp16",) * 2)
    packings = [make(table, rank) for rank, table in enumerate(gang.routes)]

    sent = [
        each.pack_gradients(fp16, gradient, travel, 1.0)
        for each, gradient, travel in zip(packings, gang.gradients, gang.travels, strict=True)
    ]
    came = packings[1].unpack_gradients(fp16, exchanged(sent)[1], gang.gradients[1], gang.travels[1])

    assert [bool(each.check.isnan()) for each in sent] == [True, False]
    assert any(bool(gradient.isnan().any()) for gradient in came)
