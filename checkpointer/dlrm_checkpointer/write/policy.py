"""When a snapshot is full and when it holds only what changed, and with how many bits: pure rules over measured sizes.

Source: Eisenman et al., Check-N-Run, NSDI 2022, sections on checkpointing policies and dynamic bit width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlrm_api.checkpoint import Bits, PolicyName
from dlrm_checkpointer.format.manifest import Growth, Kind

RESTORES_BY_BITS: tuple[tuple[int, Bits], ...] = ((1, 2), (3, 3), (20, 4))
"""Most restores for which so few bits cost no accuracy that counts."""
SAFE_BITS: Bits = 8


@dataclass(frozen=True, kw_only=True)
class ChainPolicy:
    """What the job asks of the kinds of its snapshots."""

    name: PolicyName
    base_every_s: float | None
    """Longest time between the cuts of two full snapshots."""
    max_chain: int
    """Most snapshots below one."""
    max_restore_s: float | None
    restore_bytes_per_s: float
    """What the gang reads from the store."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the next snapshot is, and why."""

    kind: Kind
    reason: str


def choose_kind(policy: ChainPolicy, growth: Growth | None, chain_length: int, time: float) -> Choice:
    """The kind of a snapshot; every rank's checkpointer comes to the same answer, since all see the same parent.

    Args:
        policy: of the job.
        growth: of the snapshot that the cut's rows are relative to (its parent); None where there is none.
        chain_length: snapshots below the parent.
        time: of the cut (Unix seconds).
    """
    if growth is None:
        return Choice(kind="full", reason="there is no snapshot before it")
    if policy.name == "full":
        return Choice(kind="full", reason="the policy is full")
    if policy.base_every_s is not None and time - growth.base_time >= policy.base_every_s:
        return Choice(kind="full", reason=f"the last full one is {time - growth.base_time:.0f} s old")
    below = chain_length + 1 if policy.name == "consecutive" else 1
    if below > policy.max_chain:
        return Choice(kind="full", reason=f"its chain would have {below} snapshots")
    increments = growth.increment_bytes if policy.name == "consecutive" else 0
    restore_s = (growth.base_bytes + increments + growth.last_bytes) / policy.restore_bytes_per_s
    if policy.max_restore_s is not None and growth.increments and restore_s > policy.max_restore_s:
        return Choice(kind="full", reason=f"restoring it would take about {restore_s:.0f} s")
    if policy.name == "intermittent" and (reason := _base_pays(growth)):
        return Choice(kind="full", reason=reason)
    return Choice(kind="increment", reason=f"the policy is {policy.name}")


def _base_pays(growth: Growth) -> str:
    """Check-N-Run's predictor: whether a full snapshot now costs less than going on; why, empty where it does not.

    With increments S_1 to S_i since the full one, of size 1: a new full one, and then the same growth once more, is
    1 + S_1 + ... + S_i; going on costs at least (i + 1) S_i.
    """
    anew = growth.base_bytes + growth.increment_bytes
    onwards = (growth.increments + 1) * growth.last_bytes
    if not growth.increments or anew > onwards:
        return ""
    return f"a full one and its increments are expected to take {anew} bytes, going on {onwards}"


def bits_for(expected_restores: int) -> Bits:
    """Fewest bits whose accuracy holds over so many restores (Check-N-Run's table)."""
    return next((bits for most, bits in RESTORES_BY_BITS if expected_restores <= most), SAFE_BITS)


def bits_in_use(wanted: Bits | Literal["auto"], expected_restores: int, restores: int) -> tuple[Bits, str]:
    """Bits of the rows that a cut stores anew, and why.

    Args:
        wanted: by the job.
        expected_restores: in the job's life.
        restores: that it went through.
    """
    if wanted != "auto":
        return wanted, "spec.checkpoint.bits"
    if restores > expected_restores:
        return SAFE_BITS, f"{restores} restores, of {expected_restores} that were expected"
    return bits_for(expected_restores), f"{expected_restores} restores are expected"
