from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from benchmarks.pruned_rows import Chunks, Layout, Prefixes, PrefixPruning, Pruning, Rows
from torch import Tensor

LAYOUT = Layout(rows=(300, 40, 5), dims=(16, 16, 4), pruned=(True, True, False))
STEP = (0.05, 1e-8)
BATCH = 64


def updates(steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Draw rows, gradients and lookups; the first rows of each table are drawn more often."""
    draw = torch.Generator().manual_seed(7)
    for step in range(1, steps + 1):
        rows, lookups = torch.unique((345 * torch.rand(BATCH, generator=draw) ** 2).long(), return_counts=True)
        gradient = torch.randn(len(rows), 16, generator=draw)
        gradient[rows >= 340, 4:] = 0
        yield rows, gradient, lookups, step


@pytest.mark.parametrize("kind", ["prefixes", "chunks", "whole rows"])
def test_no_more_bytes_than_the_budget_after_a_choice(kind: str) -> None:
    budget = LAYOUT.plain_bytes * 2 // 3
    rows: Rows
    if kind == "prefixes":
        rows = Prefixes(LAYOUT, *STEP, PrefixPruning(sizes=(4, 8, 16), warmup_steps=8), budget, BATCH)
    else:
        rows = Chunks(LAYOUT, *STEP, Pruning(warmup_steps=8), budget, 16 if kind == "whole rows" else 4)

    for update in updates(40):
        rows.update(*update)
        if update[-1] % 8 == 0:
            rows.maintain(update[-1])
            assert rows.bytes <= budget

    # The budget binds, and is used: cut-offs are eighths of octaves.
    assert rows.bytes > 0.9 * budget
    held = rows.weight[:340] != 0
    assert held.any(dim=1).sum() < 340 or held.sum() < 340 * 16


@pytest.mark.parametrize("kind", ["prefixes", "whole rows"])
def test_rows_with_all_columns_equal_plain_rows(kind: str) -> None:
    plain, rows = Rows(LAYOUT, *STEP), Rows(LAYOUT, *STEP)
    if kind == "prefixes":
        rows = Prefixes(LAYOUT, *STEP, PrefixPruning(sizes=(16,), start=-1), 1 << 20, BATCH)
    else:
        rows = Chunks(LAYOUT, *STEP, Pruning(), 1 << 20, 16)

    for update in updates(40):
        for each in (plain, rows):
            each.update(*update)
            each.maintain(update[-1])

    assert torch.allclose(rows.weight, plain.weight, atol=1e-6)


def test_absent_columns_are_zero_and_new_ones_start_at_zero() -> None:
    rows = Prefixes(LAYOUT, *STEP, PrefixPruning(sizes=(4, 16), start=0, warmup_steps=1), 1 << 20, BATCH)
    one, gradient = torch.tensor([3]), torch.ones(1, 16)

    rows.update(one, gradient, torch.tensor([1]), 1)
    small = rows.weight[3].clone()
    rows.maintain(1)
    grown = rows.weight[3].clone()
    rows.update(one, gradient, torch.tensor([1]), 2)

    assert (small[:4] != 0).all()
    assert (small[4:] == 0).all()
    assert torch.equal(grown, small)
    assert (rows.weight[3] != 0).all()
