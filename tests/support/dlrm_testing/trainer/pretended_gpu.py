"""A device of torch's beside the host, for machines without a GPU: what is computed there, and what may not be mixed.

Its tensors keep their values in host memory and take part in every operation of torch's, autograd and collectives, but
in none together with a tensor of the host, as those of a GPU don't; nor has any of them a numpy array. What it can't
tell: speed, streams, and the kernels that a GPU has of its own.

To be imported before the first backward pass of a process: autograd counts devices there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

from dlrm_testing.trainer import directory_rules
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding import local_tables, replicated_tables
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.gpu import row_directory
from dlrm_trainer.embedding.gpu.row_directory import Sets
from dlrm_trainer.embedding.table_batch import NO_ROW, HostKernel, RowUpdate, SumKernel, Tables

NAME = "pretended"
COPIES = {"aten._to_copy.default", "aten.copy_.default"}
"""Operations that take tensors of two devices."""
FACTORIES = ("empty.memory_format", "empty_strided")
backend_registration._setup_privateuseone_for_python_backend(NAME)
PRETENDED = torch.device(NAME, 0)


class MixedDevicesError(RuntimeError):
    """Report an operation on tensors of two devices."""


class Pretended(Tensor):
    """Wrap a host tensor as one of the device."""

    kept: Tensor
    """Its values."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, kept: Tensor) -> Pretended:
        """Return a tensor of the values."""
        made: Pretended = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            kept.shape,
            strides=kept.stride(),
            storage_offset=kept.storage_offset(),
            dtype=kept.dtype,
            device=PRETENDED,
        )
        made.kept = kept
        return made

    @property
    def data(self) -> Tensor:
        """See ``torch.Tensor``."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: Pretended) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.kept = other.kept

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, _types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute on the values."""
        named = dict(named or {})
        tensors = [each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)]
        foreign = [each for each in tensors if not isinstance(each, cls) and each.dim()]
        if foreign and str(operation) not in COPIES:
            raise MixedDevicesError(f"{operation}: tensors of {PRETENDED} and of {foreign[0].device}")
        device = named.get("device")
        if device is not None:
            named["device"] = HOST
        given, also = tree_map_only(cls, lambda each: each.kept, (tuple(arguments), named))
        out = operation(*given, **also)
        if str(operation) == "aten.copy_.default":
            return arguments[0]
        if device is not None and torch.device(device).type == "cpu":
            return out
        known = {id(each.kept): each for each in tensors if isinstance(each, cls)}
        return tree_map_only(Tensor, lambda each: known[id(each)] if id(each) in known else cls(each), out)


def _copy_from(source: Tensor, target: Pretended, _non_blocking: bool = False) -> Pretended:
    """Do what ``torch.tensor`` does with a tensor that it made on the host."""
    target.kept.copy_(source)
    return target


def _register() -> torch.library.Library:
    """Register the operations that torch calls before the device has a tensor."""
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        base, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, base), overload or "default")

        def make(*arguments: Any, _operation: Callable[..., Tensor] = operation, **named: Any) -> Pretended:
            return Pretended(_operation(*arguments, **named | {"device": HOST, "pin_memory": False}))

        library.impl(name, make, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


_LIBRARY = _register()  # let go of, they would be forgotten


class PretendedKernel:
    """Run ``HostKernel`` behind tensors of the device: a GPU's kernels give its bits."""

    def __init__(self, tables: Tables) -> None:
        self._kernel = HostKernel(replace(tables, device=HOST))
        self.weights = tuple(map(Pretended, self._kernel.weights))
        self.states = tuple(map(Pretended, self._kernel.states))

    def pool(self, bags: Bags, updates: bool) -> Tensor:
        """See ``table_batch.Kernel``."""
        return Pretended(self._kernel.pool(_kept_bags(bags), updates))

    def update(self, bags: Bags, gradient: Tensor, rows: Tensor, update: RowUpdate) -> None:
        """See ``table_batch.Kernel``."""
        self._kernel.update(_kept_bags(bags), _kept(gradient), _kept(rows), update)

    def add_gradients(self, bags: Bags, gradient: Tensor, sums: Tensor, touched: Tensor) -> None:
        """See ``table_batch.SumKernel``."""
        self._kernel.add_gradients(_kept_bags(bags), _kept(gradient), _kept(sums), _kept(touched))

    def update_rows(self, rows: Tensor, sums: Tensor, update: RowUpdate) -> None:
        """See ``table_batch.SumKernel``."""
        self._kernel.update_rows((given := _kept(rows))[given < NO_ROW], _kept(sums), update)


def _kept(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, Pretended), f"a tensor of {tensor.device} is given to a kernel of {PRETENDED}"
    return tensor.kept


def _kept_bags(bags: Bags) -> Bags:
    weights = None if bags.weights is None else _kept(bags.weights)
    return replace(bags, lengths=_kept(bags.lengths), ids=_kept(bags.ids), weights=weights)


def _on_kept(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run a rule of a directory behind tensors of the device."""

    def run(sets: Sets, chosen: Tensor, rows: Tensor, batch: int) -> Tensor:
        kept = (_kept(each) if isinstance(each, Tensor) else each for each in sets)
        return Pretended(rule(Sets(*kept), _kept(chosen), _kept(rows), batch))

    return run


@contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """Make the device have kernels for rows and for directories of slots."""
    made = local_tables.make_kernel

    def make_kernel(tables: Tables) -> SumKernel:
        return PretendedKernel(tables) if tables.device == PRETENDED else made(tables)

    with pytest.MonkeyPatch.context() as patch:
        for module in (local_tables, replicated_tables):
            patch.setattr(module, "make_kernel", make_kernel)
        for name in ("find_rows", "admit_rows"):
            patch.setattr(row_directory, name, _on_kept(getattr(directory_rules, name)))
        yield PRETENDED
