"""How much memory tensors take at most while a block of operations runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlrm_testing.trainer.pretended_gpu import Pretended

takes_unpromised_memory = pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2",
    reason="this machine promises no more memory than it has (vm.overcommit_memory is 2)",
)
"""Marks tests with arrays that are larger than memory, and mostly untouched."""


class LiveMemory(TorchDispatchMode):
    """Counts storages that operations make, until they are let go of; a context manager.

    What an operation takes for itself while it runs is not seen.

    Args:
        known: tensors that were there before.
        kind: of the tensors that count: all, or ``Pretended`` alone.
    """

    def __init__(self, known: Sequence[Tensor] = (), kind: type[Tensor] = Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._kind = kind
        self._counted: dict[int, int] = {}
        self.peak = 0
        """Most bytes at a time."""

    def begin(self) -> None:
        """Count from now on; what is there stays known."""
        self._counted.clear()
        self.peak = 0

    def __torch_dispatch__(
        self, operation: Any, _types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation, and count what it made."""
        made = operation(*arguments, **(named or {}))
        for each in tree_leaves(made):
            if isinstance(each, self._kind):
                self._count(each.kept if isinstance(each, Pretended) else each)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._counted[key] = size
        self.peak = max(self.peak, sum(self._counted.values()))
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._known.discard(key)
        self._counted.pop(key, None)
