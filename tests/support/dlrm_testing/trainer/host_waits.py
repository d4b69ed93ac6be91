"""Operations for which the host waits for a GPU, counted on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {"aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.nonzero.default"}
"""What bool(), float(), item() and tolist() call, and what has a shape that depends on values."""
COPIES = {"aten._to_copy.default", "aten.copy_.default"}
"""What to() and cpu() call: between devices the host waits, unless it is told not to."""


class HostWaits(TorchDispatchMode):
    """Counts them while a block runs, in its thread; a context manager.

    Args:
        kind: of the tensors that count: all, with copies left out, or those of a pretended GPU.
    """

    def __init__(self, kind: type[Tensor] = Tensor) -> None:
        super().__init__()
        self._kind = kind
        self.seen: list[str] = []
        """Names of the operations."""

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self.seen)

    def __torch_dispatch__(
        self, operation: Any, _types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        named = dict(named or {})
        made = operation(*arguments, **named)
        tensors = [each for each in tree_leaves((arguments, named, made)) if isinstance(each, Tensor)]
        name = str(operation)
        if any(isinstance(each, self._kind) for each in tensors) and (
            name in WAITING or (name in COPIES and _is_blocking(arguments, named, tensors))
        ):
            self.seen.append(name)
        return made


def _is_blocking(arguments: Sequence[Any], named: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    is_waived = named.get("non_blocking", False) or (len(arguments) > 2 and arguments[2])
    return len({each.device for each in tensors}) > 1 and not is_waived
