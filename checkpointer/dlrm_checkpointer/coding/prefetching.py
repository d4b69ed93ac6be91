"""Memory that compiled loops ask for before they need it."""

from __future__ import annotations

from typing import Any

import numba.core.cgutils
import numpy as np
from llvmlite import ir
from numba import types

from dlrm_checkpointer.coding.compiled import compiled, instruction

READ, DATA = 0, 1
ALL_LEVELS, FROM_SECOND = 3, 2
LINE = np.uint64(16)
"""float32 elements of a cache line."""
cgutils: Any = numba.core.cgutils


def _prefetching(locality: int) -> Any:
    @instruction
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


@compiled
def prefetch_lines(array: Any, first: Any, stop: Any) -> None:
    """``prefetch`` of every cache line of float32 ``array[first:stop]``; uint64 both."""
    for line in range(first, stop, LINE):
        prefetch(array, line)
