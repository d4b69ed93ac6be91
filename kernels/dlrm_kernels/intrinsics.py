"""What compiled loops ask of the processor: atomic counts, copies past the caches, long products."""

from __future__ import annotations

from typing import Any, TypeAlias

import numba.core.cgutils
import numpy as np
from llvmlite import ir
from numba import types

from dlrm_kernels.cache import intrinsic, kernel

cgutils: Any = numba.core.cgutils


@intrinsic
def fetch_add(_typing: Any, counts: Any, place: Any, amount: Any) -> Any:  # noqa: ARG001  by its type alone
    """Add to one of int64 ``counts`` in one step that no thread can come between; returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", cgutils.gep(builder, array.data, arguments[1]), arguments[2], "seq_cst")

    return types.int64(counts, types.intp, types.int64), generate


@intrinsic
def lent(_typing: Any, held: Any) -> Any:
    """The same array, or tuple of arrays, tuples and numbers, whose references are not counted.

    Each count is an atomic write to one place for all threads; what a loop takes out of a tuple is counted each time.
    Something else must hold the arrays for as long as these are used, as the caller of a compiled function does.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _lend(context, builder, signature.args[0], arguments[0])

    return held(held), generate


def _lend(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.BaseTuple):
        kinds: Any = kind.types  # type: ignore[attr-defined]  # of every tuple but the base of them
        parts = zip(kinds, cgutils.unpack_tuple(builder, value), strict=True)
        return context.make_tuple(builder, kind, [_lend(context, builder, *part) for part in parts])
    if not isinstance(kind, types.Array):
        return value
    make = context.make_array(kind)
    lending = make(context, builder)
    cgutils.copy_struct(lending, make(context, builder, value))
    lending.meminfo = cgutils.get_null_value(lending.meminfo.type)
    lending.parent = cgutils.get_null_value(lending.parent.type)
    return lending._getvalue()


@intrinsic
def bit_count(_typing: Any, number: Any) -> Any:  # noqa: ARG001
    """How many bits of a uint64 are set, as a uint64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def lowest_bit(_typing: Any, number: Any) -> Any:  # noqa: ARG001
    """The place of the lowest bit of a uint64 that is set, as a uint64; 64 where none is."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


def _streaming(floats: int) -> Any:
    """An instruction that copies so many float32 past the caches."""

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
"""Copy four float32 ``array[start:]`` to ``out[place:]`` past the caches; ``out`` is aligned to 16 bytes there."""
stream_line = _streaming(16)
"""The same of a whole cache line, aligned to 64 bytes: no part of it ever waits for the rest."""


@intrinsic
def upper_product(_typing: Any, left: Any, right: Any) -> Any:  # noqa: ARG001
    """The upper half of the 128 bits of a product of two uint64, as a uint64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


READ, DATA = 0, 1
ALL_LEVELS, FROM_SECOND = 3, 2
LINE = np.uint64(16)
"""float32 elements of a cache line."""


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
"""Begin to bring ``array[place]`` of a one-dimensional array near; any place may be named."""
prefetch_second = _prefetching(FROM_SECOND)
"""The same no nearer than the second level of caches, which waits for more lines at once than the first can."""


@kernel
def prefetch_lines(array: Any, first: Any, stop: Any) -> None:
    """``prefetch`` of every cache line of float32 ``array[first:stop]``; uint64 both."""
    for line in range(first, stop, LINE):
        prefetch(array, line)


@intrinsic
def bits_of(_typing: Any, number: Any) -> Any:  # noqa: ARG001
    """The bits of a float32, as a uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def number_of(_typing: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 with the bits of a uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


Size: TypeAlias = tuple[tuple[None, ...], ...]
"""The lengths of its tuples are the size's digits, in base 16, the lowest first."""
DIGITS, BASE = 4, 16
ONES, SIXTEENS, SQUARES, CUBES = np.uint64(1), np.uint64(16), np.uint64(256), np.uint64(4_096)


def size_of(value: int) -> Size:
    """A size below 65,536 for a loop."""
    assert 0 <= value < BASE**DIGITS, value
    return tuple((None,) * (value // BASE**digit % BASE) for digit in range(DIGITS))


@kernel
def value_of(size: Any) -> Any:
    """The size in a loop: a uint64 that is known when the loop is compiled."""
    low = np.uint64(len(size[0])) * ONES + np.uint64(len(size[1])) * SIXTEENS
    return low + np.uint64(len(size[2])) * SQUARES + np.uint64(len(size[3])) * CUBES


def size_in_type(size: Any) -> int:
    """The size, from numba's type of it: for instructions, which generate code for it."""
    return sum(len(digit.types) * BASE**number for number, digit in enumerate(size.types))
