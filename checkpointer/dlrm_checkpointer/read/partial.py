"""A cut that some ranks stored whole and others did not, because they were lost: used where a job asks for it.

The rows of the ranks that stored it go on from it, those of the lost ones from the newest snapshot. The state is none
that training ever had; what that costs in quality is measured by ``benchmarks.restores``.

Source: Maeng et al., CPR: Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation with
PartialDigest Recovery, MLSys 2021.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.attempts import in_lineage, read_attempts
from dlrm_checkpointer.format.chain import Chain
from dlrm_checkpointer.format.manifest import PARTS, ChainLink, Manifest, PartList, check_chunks, parse_part, part_key
from dlrm_checkpointer.read.fetch import Check, check_bytes, check_present
from dlrm_checkpointer.read.restore import Snapshot, snapshot_keys
from dlrm_checkpointer.types import CutMeta, SnapshotName
from dlrm_stores import ObjectStore

logger = logging.getLogger(__name__)

_PART = re.compile(r"parts/(\d+)/(\d+)/(\d+)\.json")
NO_MANIFEST = "0" * 64
"""In place of the SHA-256 of a manifest that is not there."""


@dataclass(frozen=True)
class PartialCut:
    """A cut, and the ranks whose part lists are there."""

    name: SnapshotName
    ranks: tuple[int, ...]


class PartialSnapshot(Snapshot):
    """Rows of some ranks of a cut over the newest snapshot; its dense state and its step are the cut's."""

    @property
    def uri(self) -> str:
        """Where the part lists are."""
        return f"{self.store.uri}/{PARTS}{self.step:016d}/{self.attempt:08d}/"


def find_partial(store: ObjectStore, base: Snapshot, check: Check = check_bytes) -> PartialCut | None:
    """The newest cut after a snapshot that rank 0 stored, and whichever others; None where there is none.

    What it holds is read and checked once, so that a restore can't fail midway.

    Args:
        store: the job's store.
        base: the newest snapshot of the lineage that can be used.
        check: reads it.
    """
    cuts: dict[SnapshotName, list[int]] = {}
    for info in store.list(PARTS):
        if match := _PART.fullmatch(info.key):
            cuts.setdefault(SnapshotName(int(match[1]), int(match[2])), []).append(int(match[3]))
    attempts = read_attempts(store, 0)
    committed = {SnapshotName(*key) for key in snapshot_keys(store)}
    for name in sorted(cuts.keys() - committed, reverse=True):
        if name.step <= base.step or 0 not in cuts[name] or not in_lineage(name.step, name.attempt, attempts):
            continue
        salvage = PartialCut(name, tuple(sorted(cuts[name])))
        try:
            found = open_partial(store, base, salvage)
            check(store, found.manifest.objects, lambda _key: None)
        except (SnapshotError, NoInputError) as error:
            logger.warning("cut can't be salvaged", extra={"step": name.step, "problem": str(error)})
        else:
            return salvage
    return None


def open_partial(store: ObjectStore, base: Snapshot, salvage: PartialCut) -> PartialSnapshot:
    """Open what ``find_partial`` found; any rank gets the same.

    Raises:
        NoInputError: a part list is gone.
        SnapshotError: the parts are not of one cut, or go over a snapshot newer than ``base``, or an object is gone.
    """
    step, attempt = salvage.name.step, salvage.name.attempt
    keys = [part_key(step, attempt, rank) for rank in salvage.ranks]
    manifest = _over(base, [parse_part(store.get(key), key) for key in keys], f"{store.uri}/{keys[0]}")
    check_present(store, manifest.objects)
    link = ChainLink(step=step, attempt=attempt, sha256=NO_MANIFEST)
    return PartialSnapshot(store, Chain((*base.chain.manifests, manifest), (*base.chain.links, link)))


def _over(base: Snapshot, parts: Sequence[PartList], where: str) -> Manifest:
    """What some parts of a cut would be as an increment over a snapshot.

    A part holds each row of its rank that changed since the cut's parent, and maybe more; so over the parent, or
    whatever was committed between the two, its rows are the rank's state at the cut.
    """
    first = parts[0]
    parent = CutMeta.from_json(first.meta).parent
    if parent is not None and parent.step > base.step:
        raise SnapshotError(f"{where}: goes over step {parent.step}, which can't be used")
    if any((part.meta, part.chain) != (first.meta, first.chain) for part in parts):
        raise SnapshotError(f"{where}: the parts are not of one cut")
    if first.dense is None:
        raise SnapshotError(f"{where}: has no dense state")
    chunks = tuple(chunk for part in parts for chunk in part.chunks)
    manifest = Manifest(
        kind="increment",
        bits=first.bits,
        chain=base.chain.links,
        growth=base.manifest.growth.after(sum(chunk.bytes for chunk in chunks)),
        meta=first.meta,
        chunks=chunks,
        dense=first.dense,
    )
    check_chunks(manifest, where)
    return manifest
