"""Choose what each snapshot is based on and its number of bits: pure rules over measured sizes.

Source: Eisenman et al., Check-N-Run, NSDI 2022, sections on checkpointing policies and dynamic bit width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlrm_api.checkpoint import POLICIES, Bits, PolicyName, PolicyTraits
from dlrm_checkpointer.format.manifest import ChainSummary, Kind

BITS_BY_RESTORES: tuple[tuple[int, Bits], ...] = ((1, 2), (3, 3), (20, 4))
"""Largest number of restores at which so few bits keep the model's accuracy."""
SAFE_BITS: Bits = 8


@dataclass(frozen=True, kw_only=True)
class ChainPolicy:
    """Hold what the job asks of the kinds of its snapshots."""

    name: PolicyName
    base_every_s: float | None
    """Longest time between two full snapshots."""
    max_chain: int
    """Largest number of snapshots that one depends on."""
    max_restore_s: float | None
    restore_bytes_per_s: float
    """Read bandwidth of all pods together."""

    @property
    def traits(self) -> PolicyTraits:
        """Return what the policy does."""
        return POLICIES[self.name]


def choose_kind(policy: ChainPolicy, parent: ChainSummary | None, chain_length: int, time: float) -> tuple[Kind, str]:
    """Choose the kind of a snapshot, and say why: the same in all pods, as all see the same parent.

    The parent depends on ``chain_length`` snapshots; ``time`` is that of the cut (Unix seconds).
    """
    reason = _needs_full(policy, parent, chain_length + 1 if policy.traits.chained else 1, time)
    return ("full", reason) if reason else ("increment", f"policy {policy.name}")


def _needs_full(policy: ChainPolicy, parent: ChainSummary | None, length: int, time: float) -> str:
    """Return why the next snapshot must be full, or an empty string."""
    if parent is None:
        return "no parent"
    if not policy.traits.increments:
        return f"policy {policy.name}"
    age_s = time - parent.base_time
    if policy.base_every_s is not None and age_s >= policy.base_every_s:
        return f"the last full snapshot is {age_s:.0f} s old"
    if length > policy.max_chain:
        return f"it would depend on {length} snapshots"
    increments = parent.increment_bytes if policy.traits.chained else 0
    restore_s = (parent.base_bytes + increments + parent.last_bytes) / policy.restore_bytes_per_s
    if policy.max_restore_s is not None and parent.increments and restore_s > policy.max_restore_s:
        return f"a restore would take about {restore_s:.0f} s"
    return _full_pays(parent) if policy.traits.predicts else ""


def _full_pays(parent: ChainSummary) -> str:
    """Return why a full snapshot now is expected to cost less than another increment, or an empty string.

    With increments S_1 to S_i since a full snapshot of size 1, a new full one followed by the same growth costs
    1 + S_1 + ... + S_i; further increments cost at least (i + 1) S_i.
    """
    full = parent.base_bytes + parent.increment_bytes
    increments = (parent.increments + 1) * parent.last_bytes
    if not parent.increments or full > increments:
        return ""
    return f"a full snapshot and its increments are expected to take {full} bytes, more increments {increments}"


def bits_for(expected_restores: int) -> Bits:
    """Return the fewest bits that keep the accuracy over so many restores (Check-N-Run's table)."""
    return next((bits for restores, bits in BITS_BY_RESTORES if expected_restores <= restores), SAFE_BITS)


def bits_in_use(wanted: Bits | Literal["auto"], expected_restores: int, restores: int) -> tuple[Bits, str]:
    """Return the bits of rows that a cut quantizes, and why; ``wanted`` is ``spec.checkpoint.bits``."""
    if wanted != "auto":
        return wanted, "spec.checkpoint.bits"
    if restores > expected_restores:
        return SAFE_BITS, f"{restores} restores, {expected_restores} expected"
    return bits_for(expected_restores), f"{expected_restores} restores expected"
