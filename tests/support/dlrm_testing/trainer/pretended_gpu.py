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

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

from dlrm_kernels.dirty_rows import LINE_ROWS, Words, bitmap_of, mark_rows
from dlrm_testing.trainer import directory_rules
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding import collection, local_tables, replicated_tables
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.gpu import row_directory
from dlrm_trainer.embedding.gpu.row_directory import Sets
from dlrm_trainer.embedding.messages import Formats, HostPacking, Outgoing, Packing, Travel
from dlrm_trainer.embedding.placement import Routes
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


class PretendedPacking:
    """Run ``HostPacking`` behind tensors of the device: a GPU's kernels give its bytes."""

    def __init__(self, routes: Routes, rank: int) -> None:
        self._packing = HostPacking(routes, rank)

    def pack_pooled(self, formats: Formats, pooled: Sequence[Tensor], travel: Travel) -> Outgoing:
        """See ``messages.Packing``."""
        return _sent(self._packing.pack_pooled(formats, [*map(_kept, pooled)], travel.copied(_kept)))

    def unpack_pooled(
        self, formats: Formats, came: Tensor, pooled: Sequence[Tensor], replicated: Sequence[Tensor], travel: Travel
    ) -> Tensor:
        """See ``messages.Packing``."""
        given = [*map(_kept, pooled)], [*map(_kept, replicated)]
        return Pretended(self._packing.unpack_pooled(formats, _kept(came), *given, travel.copied(_kept)))

    def pack_gradients(self, formats: Formats, gradient: Tensor, travel: Travel, scale: float) -> Outgoing:
        """See ``messages.Packing``."""
        return _sent(self._packing.pack_gradients(formats, _kept(gradient), travel.copied(_kept), scale))

    def unpack_gradients(self, formats: Formats, came: Tensor, gradient: Tensor, travel: Travel) -> list[Tensor]:
        """See ``messages.Packing``."""
        given = _kept(came), _kept(gradient), travel.copied(_kept)
        return [*map(Pretended, self._packing.unpack_gradients(formats, *given))]

    def replicated_gradients(self, gradient: Tensor) -> list[Tensor]:
        """See ``messages.Packing``."""
        return [*map(Pretended, self._packing.replicated_gradients(_kept(gradient)))]


class PretendedMarks:
    """Mark rows by the host's loop; a ``changes.Marks``."""

    def __init__(self, bits: int) -> None:
        self._bitmap, self.count = bitmap_of(bits // LINE_ROWS), 0

    def mark(self, ids: Tensor, sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """See ``changes.Marks``."""
        self.count += mark_rows(self._bitmap, _kept(ids).numpy(), sizes, starts)

    def take(self) -> Words:
        """See ``changes.Marks``."""
        words, self.count = self._bitmap.words.copy(), 0
        self._bitmap.words[:] = 0
        return words


def _sent(outgoing: Outgoing) -> Outgoing:
    return outgoing._replace(message=Pretended(outgoing.message), check=Pretended(outgoing.check))


@contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """Make the device have kernels for rows, their marks, messages and directories of slots."""
    made, packed = local_tables.make_kernel, collection.make_packing

    def make_kernel(tables: Tables) -> SumKernel:
        return PretendedKernel(tables) if tables.device == PRETENDED else made(tables)

    def make_packing(routes: Routes, rank: int, device: torch.device) -> Packing:
        return PretendedPacking(routes, rank) if device == PRETENDED else packed(routes, rank, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collection, "make_packing", make_packing)
        patch.setattr(local_tables, "make_marks", lambda bits, device: PretendedMarks(bits))
        for module in (local_tables, replicated_tables):
            patch.setattr(module, "make_kernel", make_kernel)
        for name in ("find_rows", "admit_rows"):
            patch.setattr(row_directory, name, _on_kept(getattr(directory_rules, name)))
        yield PRETENDED
