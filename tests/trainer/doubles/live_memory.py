"""How much memory tensors take at most while a block of operations runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from pretended_gpu import Pretended
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts storages that operations make, until they are let go of; a context manager.

    What an operation takes for itself while it runs is not seen.

    Args:
        known: tensors that were there before.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live = 0
        self.peak = 0
        """Most bytes at a time."""

    def __torch_dispatch__(
        self, operation: Any, _types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation, and count what it made."""
        made = operation(*arguments, **(named or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._count(each.kept if isinstance(each, Pretended) else each)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size
