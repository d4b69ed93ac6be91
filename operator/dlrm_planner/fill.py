"""Gives bytes of one tier to the tables that gain most by them: water-filling over concave curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_planner.reuse import Floats

ROUNDS = 64
"""Times that tables too large to be taken whole are put aside; then all of them are."""
SIGNIFICANT = 2.0**30
"""What gains differ in beyond one in so many is how a processor rounds, and makes no plan another one."""


@dataclass(frozen=True, kw_only=True)
class Wants:
    """What N tables would do with bytes."""

    rows: Floats
    """(N, K) points of each curve: rows, ascending."""
    hits: Floats
    """(N, K) hits at these points."""
    start: Floats
    """(N,) rows that each table has already."""
    stop: Floats
    """(N,) rows that it may have at most."""
    row_cost: Floats
    """(N,) bytes of one more row."""
    whole_cost: Floats
    """(N,) bytes, beyond those that it has, after which the table needs no curve any more: all of it is here; inf
    where that is no choice."""
    whole_hits: Floats
    """(N,) hits then."""


@dataclass(frozen=True)
class Filled:
    """What each table got."""

    rows: Floats
    """(N,)"""
    whole: NDArray[np.bool_]
    """(N,) taken whole; its rows mean nothing."""
    left: float
    """Bytes that nobody gained by."""


def fill(wants: Wants, budget: float, *, spend_all: bool = False) -> Filled:
    """Spend the budget on whatever gains most hits a byte; with ``spend_all`` also where no more hits are gained."""
    x = np.clip(wants.rows, wants.start[:, None], wants.stop[:, None])
    x = np.concatenate([x, wants.stop[:, None]], axis=1)
    hits = np.stack([np.interp(a, b, c) for a, b, c in zip(x, wants.rows, wants.hits, strict=True)])
    cost, gain = np.diff(x, axis=1) * wants.row_cost[:, None], np.diff(hits, axis=1)
    ends = np.concatenate([np.zeros((len(x), 1)), np.cumsum(cost, axis=1)], axis=1)
    worth = _significant(np.where(cost > 0, gain / np.maximum(cost, 1e-9), np.inf))
    open_ = np.isfinite(wants.whole_cost)
    spent, whole = np.zeros_like(cost), np.zeros(len(x), bool)
    for turn in range(ROUNDS + 1):
        if turn == ROUNDS:
            open_[:] = False
        jump_cost, jump_worth, until = _jumps(wants, ends, hits, worth, open_)
        rest = np.where((ends[:, :-1] < until[:, None]) & ~whole[:, None], cost - spent, 0.0)
        costs = np.concatenate([rest.ravel(), np.where(open_, jump_cost, 0.0)])
        gains = np.concatenate([worth.ravel(), jump_worth])
        order = np.argsort(-gains, kind="stable")
        order = order[(costs[order] > 0) & ((gains[order] > 0) | (spend_all & (order < cost.size)))]
        total = np.cumsum(costs[order])
        fits = int(np.searchsorted(total, budget + 1e-6, side="right"))
        taken = order[:fits]
        budget -= float(total[fits - 1]) if fits else 0.0
        divisible = taken[taken < cost.size]
        spent.ravel()[divisible] += costs[divisible]
        whole[taken[taken >= cost.size] - cost.size] = True
        open_ &= ~whole
        if fits == len(order):
            break
        if order[fits] < cost.size:
            spent.ravel()[order[fits]] += budget
            budget = 0.0
            break
        open_ &= jump_cost <= budget  # what is left only shrinks
    rows = wants.start + np.floor(spent.sum(axis=1) / wants.row_cost + 1e-6)
    return Filled(np.minimum(rows, wants.stop), whole, budget)


def _jumps(
    wants: Wants, ends: Floats, hits: Floats, worth: Floats, open_: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """(N,) cost and gain a byte of taking each table whole, and the bytes spent on it before that is due.

    The upper hull of a concave curve and one more point leaves the curve where its line to that point is least steep.
    """
    left = np.where(open_, wants.whole_cost, np.inf)[:, None] - ends
    slope = _significant(np.where(left > 0, (wants.whole_hits[:, None] - hits) / np.where(left > 0, left, 1), np.inf))
    due = np.argmin(slope, axis=1)
    here = np.arange(len(due))
    until = np.where(open_, ends[here, due], np.inf)
    least = np.where(ends[:, :-1] < until[:, None], worth, np.inf).min(axis=1)  # never before its own segments
    best = np.minimum(slope[here, due], least * (1 - 1e-9))
    return np.where(open_, left[here, due], 0.0), np.where(open_, best, 0.0), until


def _significant(values: Floats) -> Floats:
    """Without the last digits, so that equal gains are equal on every processor and the first one listed goes first."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * SIGNIFICANT) / SIGNIFICANT, exponent)
