"""Operations for which the host waits for a GPU, counted on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.nonzero.default"}
"""What bool(), float() and item() call, and what has a shape that depends on values."""


class HostWaits(TorchDispatchMode):
    """Counts them while a block runs; a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operation: Any, _types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        self.count += str(operation) in WAITING
        return operation(*arguments, **(named or {}))
