"""Numbers as their bits, and the other way round, in compiled loops."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from dlrm_checkpointer.coding.compiled import instruction


@instruction
def bits_of(_typing: Any, number: Any) -> Any:  # noqa: ARG001
    """The bits of a float32, as a uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@instruction
def number_of(_typing: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 with the bits of a uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate
