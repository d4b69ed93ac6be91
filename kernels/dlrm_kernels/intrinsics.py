"""Provide LLVM instructions that numba lacks: atomic adds, prefetches, streaming stores, wide products."""

from __future__ import annotations

from typing import Any, TypeAlias

import numba.core.cgutils
import numpy as np
from llvmlite import ir
from numba import types

from dlrm_kernels.cache import intrinsic, kernel

cgutils: Any = numba.core.cgutils


@intrinsic
def fetch_add(_typing: Any, counts: Any, place: Any, amount: Any) -> Any:  # noqa: ARG001  by its type
    """Add to one of int64 ``counts`` atomically, and return its old value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", cgutils.gep(builder, array.data, arguments[1]), arguments[2], "seq_cst")

    return types.int64(counts, types.intp, types.int64), generate


@intrinsic
def borrowed(_typing: Any, held: Any) -> Any:
    """Return an array, or a tuple of arrays, tuples and numbers, without reference counting.

    Each count is an atomic write to memory that all threads share, and every access to a tuple's array is counted.
    The caller of a kernel must hold the arrays while these are used.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _borrow(context, builder, signature.args[0], arguments[0])

    return held(held), generate


def _borrow(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.BaseTuple):
        # The base class of tuple types lacks ``types``.
        kinds: Any = kind.types  # type: ignore[attr-defined]
        parts = zip(kinds, cgutils.unpack_tuple(builder, value), strict=True)
        return context.make_tuple(builder, kind, [_borrow(context, builder, *part) for part in parts])
    if not isinstance(kind, types.Array):
        return value
    make = context.make_array(kind)
    borrowing = make(context, builder)
    cgutils.copy_struct(borrowing, make(context, builder, value))
    borrowing.meminfo = cgutils.get_null_value(borrowing.meminfo.type)
    borrowing.parent = cgutils.get_null_value(borrowing.parent.type)
    return borrowing._getvalue()


@intrinsic
def bit_count(_typing: Any, number: Any) -> Any:  # noqa: ARG001
    """Return the number of set bits of a uint64, as a uint64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def lowest_bit(_typing: Any, number: Any) -> Any:  # noqa: ARG001
    """Return the index of the lowest set bit of a uint64, as a uint64; 64 for 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _streaming(floats: int) -> Any:
    # An intrinsic that copies so many float32 past the caches.

    @intrinsic
    def stream(_typing: Any, out: Any, place: Any, array: Any, start: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector = ir.VectorType(ir.FloatType(), floats).as_pointer()
            to = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            from_ = context.make_array(signature.args[2])(context, builder, arguments[2]).data
            value = builder.load(builder.bitcast(cgutils.gep(builder, from_, arguments[3]), vector), align=4)
            place = builder.bitcast(cgutils.gep(builder, to, arguments[1]), vector)
            stored = builder.store(value, place, align=4 * floats)
            one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
            stored.set_metadata("nontemporal", one)
            return context.get_dummy_value()

        return types.void(out, types.uintp, array, types.uintp), generate

    return stream


stream_four = _streaming(4)
"""Copy four float32 ``array[start:]`` to ``out[place:]`` past the caches; the target is aligned to 16 bytes."""
stream_line = _streaming(16)
"""Copy a cache line likewise, aligned to 64 bytes, so that it leaves the write buffer at once."""


@intrinsic
def upper_product(_typing: Any, left: Any, right: Any) -> Any:  # noqa: ARG001
    """Return the upper 64 bits of the product of two uint64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


READ, DATA = 0, 1
ALL_LEVELS, FROM_SECOND = 3, 2
LINE = np.uint64(16)
"""float32 values of a cache line."""


def _prefetching(locality: int) -> Any:
    @intrinsic
    def prefetch(_typing: Any, array: Any, place: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            pointer = builder.bitcast(cgutils.gep(builder, data, arguments[1]), cgutils.voidptr_t)
            kinds = [ir.IntType(32)] * 3
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *kinds]), "llvm.prefetch.p0"
            )
            constants = [ir.Constant(kinds[0], value) for value in (READ, locality, DATA)]
            builder.call(function, [pointer, *constants])
            return context.get_dummy_value()

        return types.void(array, types.uintp), generate

    return prefetch


prefetch = _prefetching(ALL_LEVELS)
"""Prefetch ``array[place]`` of a one-dimensional array into the caches; any index is allowed."""
prefetch_second = _prefetching(FROM_SECOND)
"""Prefetch only into the second level of caches, which can wait for more lines than the first."""


@kernel
def prefetch_lines(array: Any, first: Any, stop: Any) -> None:
    """Prefetch every cache line of float32 ``array[first:stop]``; both indices are uint64."""
    for line in range(first, stop, LINE):
        prefetch(array, line)


def _reinterpreting(given: Any, wanted: Any, kind: Any) -> Any:
    @intrinsic
    def reinterpret(_typing: Any, value: Any) -> Any:  # noqa: ARG001
        return wanted(given), lambda _context, builder, _signature, arguments: builder.bitcast(arguments[0], kind)

    return reinterpret


bits_of = _reinterpreting(types.float32, types.uint32, ir.IntType(32))
"""Return the bits of a float32 as a uint32."""
number_of = _reinterpreting(types.uint32, types.float32, ir.FloatType())
"""Return the float32 with the bits of a uint32."""


Size: TypeAlias = tuple[tuple[None, ...], ...]
"""A size as a type: the lengths of its tuples are the size's digits in base 16, lowest first."""
DIGITS, BASE = 4, 16


def size_of(value: int) -> Size:
    """Return a size below 65,536 as an argument for which kernels are specialized."""
    assert 0 <= value < BASE**DIGITS, value
    return tuple((None,) * (value // BASE**digit % BASE) for digit in range(DIGITS))


@intrinsic
def value_of(_typing: Any, size: Any) -> Any:
    """Return the size in a kernel: a uint64 constant at compile time, or any uint64 that is given instead."""
    if isinstance(size, types.Integer):
        return types.uint64(types.uint64), lambda _context, _builder, _signature, arguments: arguments[0]
    constant = size_in_type(size)
    return types.uint64(size), lambda context, _builder, signature, _arguments: context.get_constant(
        signature.return_type, constant
    )


def size_in_type(size: Any) -> int:
    """Return the size from its numba type, for intrinsics that generate code for it."""
    return sum(len(digit.types) * BASE**number for number, digit in enumerate(size.types))
