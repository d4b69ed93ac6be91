"""What compiled loops ask of the processor beside arithmetic: atomic counts, prefetches."""

from __future__ import annotations

from typing import Any

import numba.core.cgutils
import numpy as np
from llvmlite import ir
from numba import types

from dlrm_checkpointer.compiled import compiled, instruction

READ, ALL_LEVELS, DATA = 0, 3, 1
LINE = np.uint64(16)
"""float32 elements of a cache line."""
cgutils: Any = numba.core.cgutils


@instruction
def fetch_add(_typing: Any, counts: Any, place: Any, amount: Any) -> Any:  # noqa: ARG001  by its type alone
    """Add to one of int64 ``counts`` in one step that no thread can come between; returns what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", cgutils.gep(builder, array.data, arguments[1]), arguments[2], "seq_cst")

    return types.int64(counts, types.intp, types.int64), generate


@instruction
def lent(_typing: Any, array: Any) -> Any:
    """The same array, whose references are not counted: each count is an atomic write to one place for all threads.

    Something else must hold the array for as long as this one is used, as the caller of a compiled function does.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        make = context.make_array(signature.args[0])
        given, lending = make(context, builder, arguments[0]), make(context, builder)
        cgutils.copy_struct(lending, given)
        lending.meminfo = cgutils.get_null_value(lending.meminfo.type)
        lending.parent = cgutils.get_null_value(lending.parent.type)
        return lending._getvalue()

    return array(array), generate


@instruction
def prefetch(_typing: Any, array: Any, place: Any) -> Any:  # noqa: ARG001
    """Begin to bring ``array[place]`` of a one-dimensional array near; any place may be named."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(cgutils.gep(builder, data, arguments[1]), cgutils.voidptr_t)
        kinds = [ir.IntType(32)] * 3
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *kinds]), "llvm.prefetch.p0"
        )
        constants = [ir.Constant(kinds[0], value) for value in (READ, ALL_LEVELS, DATA)]
        builder.call(function, [pointer, *constants])
        return context.get_dummy_value()

    return types.void(array, types.uintp), generate


@compiled
def prefetch_lines(array: Any, first: Any, stop: Any) -> None:
    """``prefetch`` of every cache line of float32 ``array[first:stop]``; uint64 both."""
    for line in range(first, stop, LINE):
        prefetch(array, line)


@instruction
def bit_count(_typing: Any, number: Any) -> Any:  # noqa: ARG001
    """How many bits of a uint64 are set, as a uint64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@instruction
def lowest_bit(_typing: Any, number: Any) -> Any:  # noqa: ARG001
    """The place of the lowest bit of a uint64 that is set, as a uint64; 64 where none is."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@instruction
def stream_four(_typing: Any, out: Any, place: Any, array: Any, start: Any) -> Any:  # noqa: ARG001
    """Copy four float32 ``array[start:]`` to ``out[place:]`` past the caches; ``out`` is aligned to 16 bytes there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        four = ir.VectorType(ir.FloatType(), 4).as_pointer()
        to = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        from_ = context.make_array(signature.args[2])(context, builder, arguments[2]).data
        value = builder.load(builder.bitcast(cgutils.gep(builder, from_, arguments[3]), four), align=4)
        stored = builder.store(value, builder.bitcast(cgutils.gep(builder, to, arguments[1]), four), align=16)
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        stored.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(out, types.uintp, array, types.uintp), generate
