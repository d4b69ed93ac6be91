"""How the rows of each cut are stored: with how many bits, and over which snapshots. The same in all pods of a gang."""

from __future__ import annotations

import logging
from typing import Literal

from dlrm_api.checkpoint import Bits
from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.attempts import read_attempts
from dlrm_checkpointer.format.chain import Basis, BrokenChainError, basis, load_chain
from dlrm_checkpointer.handoff.protocol import ReadyCut, SliceName
from dlrm_checkpointer.writing.policy import ChainPolicy, bits_in_use, choose_kind
from dlrm_checkpointer.writing.upload import Way
from dlrm_stores.base import ObjectStore

logger = logging.getLogger(__name__)


class Ways:
    """Decides by what the job asks and what the store holds.

    Args:
        store: the job's store.
        bits: that the job asks for.
        expected_restores: in the job's life, for ``auto``.
        chains: which kinds of snapshots the job asks for.
    """

    def __init__(
        self, store: ObjectStore, bits: Bits | Literal["auto"], expected_restores: int, chains: ChainPolicy
    ) -> None:
        self._store, self._wanted, self._expected, self._chains = store, bits, expected_restores, chains
        self._bits: dict[int, Bits] = {}

    def of(self, cut: ReadyCut) -> Way:
        """How a cut is stored; a slice of one as it is, whatever the cut goes over.

        Raises:
            BrokenChainError: its parent can't be read.
        """
        bits, is_slice = self._bits_of(cut.name.attempt), isinstance(cut.name, SliceName)
        basis = Basis(kind="full") if is_slice else self._basis(cut)
        chained = self._chains.name == "consecutive" and (is_slice or basis.kind == "increment")
        return Way(bits=bits, basis=basis, chained=chained)

    def _basis(self, cut: ReadyCut) -> Basis:
        """What the cut's snapshot goes over: a function of the cut, its parent and the job, so all pods agree."""
        parent, chains = cut.meta.parent, self._chains
        try:
            chain = None if parent is None else load_chain(self._store, parent)
        except (NoInputError, SnapshotError) as error:
            raise BrokenChainError(str(error)) from error
        growth, length = (chain.newest.growth, len(chain.links) - 1) if chain else (None, 0)
        choice = choose_kind(chains, growth, length, cut.meta.time)
        said = {"step": cut.name.step, "kind": choice.kind, "why": choice.reason}
        logger.info("kind of snapshot chosen", extra=said)
        return basis(choice.kind, chains.name, chain)

    def _bits_of(self, attempt: int) -> Bits:
        """Bits for rows of an attempt's cuts."""
        if attempt not in self._bits:
            earlier = [each for each in read_attempts(self._store, 0) if each.number <= attempt]
            restores = sum(each.restored_step is not None for each in earlier)
            bits, why = bits_in_use(self._wanted, self._expected, restores)
            logger.info("bits chosen", extra={"bits": bits, "why": why})
            self._bits[attempt] = bits
        return self._bits[attempt]
