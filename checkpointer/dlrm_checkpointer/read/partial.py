"""Restore from a cut that only some ranks stored, because the others were lost; opt-in per job.

Ranks that stored the cut continue from it, lost ranks from the newest snapshot. Training never had this state;
``benchmarks.restores`` measures what it costs in quality.

Source: Maeng et al., CPR: Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation with
Partial Recovery, MLSys 2021.
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
"""Stands for the SHA-256 of a manifest that does not exist."""


@dataclass(frozen=True)
class PartialCut:
    """Name a cut and the ranks that stored their part list."""

    name: SnapshotName
    ranks: tuple[int, ...]


class PartialSnapshot(Snapshot):
    """Combine some ranks' rows of a cut with the newest snapshot; dense state and step are the cut's."""

    @property
    def uri(self) -> str:
        """Return the URI of the part lists."""
        return f"{self.store.uri}/{PARTS}{self.step:016d}/{self.attempt:08d}/"


def find_partial(store: ObjectStore, base: Snapshot, check: Check = check_bytes) -> PartialCut | None:
    """Find the newest cut after ``base`` that rank 0 and any others stored.

    Its objects are read and checked once, so that a restore cannot fail midway.

    Args:
        store: the job's store.
        base: the newest usable snapshot of the lineage.
        check: reads and checks objects.
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
            logger.warning("skipping unusable partial cut", extra={"step": name.step, "error": str(error)})
        else:
            return salvage
    return None


def open_partial(store: ObjectStore, base: Snapshot, salvage: PartialCut) -> PartialSnapshot:
    """Open what ``find_partial`` found, with the same result on every rank.

    Raises:
        NoInputError: a part list is missing.
        SnapshotError: the parts belong to different cuts, or are based on a snapshot newer than ``base``, or an object
            is missing.
    """
    step, attempt = salvage.name.step, salvage.name.attempt
    keys = [part_key(step, attempt, rank) for rank in salvage.ranks]
    manifest = _over(base, [parse_part(store.get(key), key) for key in keys], f"{store.uri}/{keys[0]}")
    check_present(store, manifest.objects)
    link = ChainLink(step=step, attempt=attempt, sha256=NO_MANIFEST)
    return PartialSnapshot(store, Chain((*base.chain.manifests, manifest), (*base.chain.links, link)))


def _over(base: Snapshot, parts: Sequence[PartList], where: str) -> Manifest:
    """Build the manifest of some parts of a cut as an increment over a snapshot.

    A part holds at least the rows of its rank that changed since the cut's parent. So on top of the parent, or of a
    snapshot committed between the two, its rows give the rank's state at the cut.
    """
    first = parts[0]
    parent = CutMeta.from_json(first.meta).parent
    if parent is not None and parent.step > base.step:
        raise SnapshotError(f"{where}: based on step {parent.step}, which cannot be used")
    if any((part.meta, part.chain) != (first.meta, first.chain) for part in parts):
        raise SnapshotError(f"{where}: the parts belong to different cuts")
    if first.dense is None:
        raise SnapshotError(f"{where}: dense state is missing")
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
