"""Compute the dot products of all pairs of a sample's vectors, and their gradients.

The sums of several vectors' gradients stay in vector registers: a loop over columns would read and write a sum for
every product.

Shapes: n samples, V vectors of E elements each, of which one may be the bottom MLP's output and T = V or V - 1 are
features; P = V (V - 1) / 2 pairs: the lower triangle, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba.core.cgutils
import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from dlrm_kernels.cache import ANY_ORDER, intrinsic, kernel
from dlrm_kernels.intrinsics import Size, prefetch_lines, size_in_type, size_of, value_of
from dlrm_kernels.parallel import finish, parallel_for, take

Floats = NDArray[np.float32]
U64 = np.uint64
ROWS = 6
"""Number of vectors with sums that fit into registers at once."""
HAS_32_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
LANES, REGISTERS = (16, 4) if HAS_32_REGISTERS else (8, 2)
"""float32 elements of a register, and registers of one vector's sum."""
FLOAT, WORD = ir.FloatType(), ir.IntType(64)
cgutils: Any = numba.core.cgutils
Sums = list[list[Any]]
"""Registers of each vector."""


@intrinsic
def sum_partners(
    _typing: Any,
    size: Any,
    rows: Any,
    gradient: Any,
    start: Any,  # noqa: ARG001  only its type matters, as below
    first: Any,  # noqa: ARG001
    count: Any,  # noqa: ARG001
    vectors: Any,
    out: Any,
    place: Any,  # noqa: ARG001
) -> Any:
    """Fill ``out[place:]``, for vectors i, with the sum over all others j of gradient(i, j) times vector j.

    Args:
        size: ``size_of`` a vector.
        rows: ``size_of`` how many vectors i, at most ``ROWS``.
        gradient: float32, of all pairs: the lower triangle, row by row.
        start: index of the sample's first gradient.
        first: number of the first vector i.
        count: number of all vectors.
        vectors: float32, one after the other.
        out: float32; written vector after vector.
        place: index of the first element to write.
    """
    width, some = size_in_type(size), size_in_type(rows)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def data(number: int) -> Any:
            return context.make_array(signature.args[number])(context, builder, arguments[number]).data

        first, count, place = arguments[4], arguments[5], arguments[8]
        gradients = cgutils.gep(builder, data(2), arguments[3])
        target = cgutils.gep(builder, data(7), place)
        lanes = next(lanes for lanes in (LANES, 8, 4) if lanes <= LANES and width % lanes == 0)
        for column in range(0, width, lanes * REGISTERS):
            columns = range(column, min(width, column + lanes * REGISTERS), lanes)
            tile = _Tile(builder, lanes, columns, width, some, gradients, data(6))
            for row, registers in enumerate(tile.summed(first, count)):
                for register, at in zip(registers, columns, strict=True):
                    builder.store(register, tile.pointer(target, row * width + at), align=4)
        return context.get_dummy_value()

    place_type = types.uintp
    return types.void(size, rows, gradient, *[place_type] * 3, vectors, out, place_type), generate


@dataclass(frozen=True)
class _Tile:
    """Generate code for some columns of some vectors' sums."""

    builder: Any
    lanes: int
    columns: Sequence[int]
    width: int
    rows: int
    gradients: Any
    vectors: Any

    def summed(self, first: Any, count: Any) -> Sums:
        """Return the sums over all partners: those numbered below the vectors, among them, and above them."""
        builder = self.builder
        zero = ir.Constant(self.type, [0.0] * self.lanes)
        own = [builder.add(first, _word(row)) for row in range(self.rows)]
        triangle_rows = [self._triangle_row(number) for number in own]
        sums: Sums = [[zero] * len(self.columns)] * self.rows
        sums = self._loop(_word(0), first, sums, lambda partner: [(row, partner) for row in triangle_rows])
        for partner, number in enumerate(own):
            places = [
                None if row == partner else (triangle_rows[max(row, partner)], own[min(row, partner)])
                for row in range(self.rows)
            ]
            sums = self._advanced(sums, number, places)
        return self._loop(
            builder.add(first, _word(self.rows)),
            count,
            sums,
            lambda partner: [(self._triangle_row(partner), number) for number in own],
        )

    @property
    def type(self) -> Any:
        """Return the type of a register."""
        return ir.VectorType(FLOAT, self.lanes)

    def pointer(self, data: Any, place: int) -> Any:
        """Return a pointer to a register's elements in memory."""
        return self.builder.bitcast(cgutils.gep(self.builder, data, _word(place)), self.type.as_pointer())

    def _triangle_row(self, number: Any) -> Any:
        """Return a pointer to the gradients of a vector's pairs with those before it."""
        builder = self.builder
        pairs = builder.lshr(builder.mul(number, builder.sub(number, _word(1))), _word(1))
        return cgutils.gep(builder, self.gradients, pairs)

    def _loop(self, begin: Any, end: Any, sums: Sums, places: Callable[[Any], Sequence[Any]]) -> Sums:
        """Add partners from ``begin`` to below ``end``."""
        builder, before = self.builder, self.builder.block
        head, body, done = (builder.append_basic_block(name) for name in ("partners", "partner", "added"))
        builder.branch(head)
        builder.position_at_end(head)
        partner = builder.phi(WORD)
        carried = [[builder.phi(self.type) for _ in row] for row in sums]
        builder.cbranch(builder.icmp_unsigned("<", partner, end), body, done)
        builder.position_at_end(body)
        added = self._advanced(carried, partner, places(partner))
        partner.add_incoming(begin, before)
        partner.add_incoming(builder.add(partner, _word(1)), body)
        for phis, old, new in zip(carried, sums, added, strict=True):
            for phi, first, next_ in zip(phis, old, new, strict=True):
                phi.add_incoming(first, before)
                phi.add_incoming(next_, body)
        builder.branch(head)
        builder.position_at_end(done)
        return carried

    def _advanced(self, sums: Sums, partner: Any, places: Sequence[Any]) -> Sums:
        """Add one partner to the sums, with gradients at ``places``; None skips a vector."""
        builder = self.builder
        vector = cgutils.gep(builder, self.vectors, builder.mul(partner, _word(self.width)))
        parts = [builder.load(self.pointer(vector, column), align=4) for column in self.columns]
        added: Sums = []
        for row, place in zip(sums, places, strict=True):
            if place is None:
                added.append(row)
                continue
            factor = self._spread(builder.load(cgutils.gep(builder, *place)))
            added.append([self._product_and_sum(factor, part, each) for part, each in zip(parts, row, strict=True)])
        return added

    def _spread(self, value: Any) -> Any:
        """Return a register with the value in all lanes."""
        none = ir.Constant(self.type, ir.Undefined)
        one = self.builder.insert_element(none, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(one, none, ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), None))

    def _product_and_sum(self, factor: Any, part: Any, total: Any) -> Any:
        signature = ir.FunctionType(self.type, [self.type] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, signature, f"llvm.fmuladd.v{self.lanes}f32")
        return self.builder.call(function, [factor, part, total])


def _word(value: int) -> Any:
    return ir.Constant(WORD, value)


ZERO, ONE, FOUR = U64(0), U64(1), U64(4)
TILE = U64(ROWS)
ONE_ROW, ROWS_OF_TILE = size_of(1), size_of(ROWS)
UNIT_SAMPLES = 64
"""Samples that a thread takes at a time."""


def dot_products(bottom: Floats | None, features: Floats, out: Floats, dim: int, threads: int) -> None:
    """Compute the products of all pairs of each sample.

    Args:
        bottom: (n, E), copied to the first columns of ``out``; None: features interact only with each other.
        features: (n, T * E).
        out: (n, E + P), or (n, P) without ``bottom``; filled.
        dim: E.
        threads: to use.
    """
    inputs = [(features if each is None else each).reshape(-1) for each in (bottom, features)]
    sizes, stride = _sizes(bottom, features, dim), U64(out.shape[1])
    parallel_for(_dot_products, _units(out), threads, sizes, *inputs, out.reshape(-1), len(out), stride)


def dot_gradients(
    bottom: Floats | None,
    features: Floats,
    gradient: Floats,
    to_bottom: Floats | None,
    to_features: Floats,
    dim: int,
    threads: int,
) -> None:
    """Fill in the gradients of ``dot_products``: ``to_bottom`` and ``to_features``, shaped like its inputs."""
    inputs = [(features if each is None else each).reshape(-1) for each in (bottom, features)]
    outputs = [(to_features if each is None else each).reshape(-1) for each in (to_bottom, to_features)]
    sizes, stride = _sizes(bottom, features, dim), U64(gradient.shape[1])
    arrays = [*inputs, gradient.reshape(-1), *outputs]
    parallel_for(_dot_gradients, _units(gradient), threads, sizes, *arrays, len(gradient), stride)


def _units(samples: Floats) -> int:
    return max(1, len(samples) // UNIT_SAMPLES)


def _sizes(bottom: Floats | None, features: Floats, dim: int) -> tuple[Size, Size, Size, Size]:
    """Return V, E, whether there is a bottom, and the number of features beyond whole tiles."""
    count = features.shape[1] // dim
    return size_of(count + (bottom is not None)), size_of(dim), size_of(int(bottom is not None)), size_of(count % ROWS)


@kernel
def _values(sizes: Any) -> Any:
    """Return V, E, and how many of the vectors (1 or 0) are the bottom MLP's."""
    return value_of(sizes[0]), value_of(sizes[1]), value_of(sizes[2])


@kernel(fastmath=ANY_ORDER)
def _load(sizes: Any, bottom: Any, features: Any, sample: Any, x: Any) -> None:
    count, width, own = _values(sizes)
    if own:
        for k in range(width):
            x[k] = bottom[sample * width + k]
    start = sample * (count - own) * width
    for k in range((count - own) * width):
        x[own * width + k] = features[start + k]


@kernel(fastmath=ANY_ORDER)
def _dot_products(
    counts: Any, units: int, sizes: Any, bottom: Any, features: Any, out: Any, samples: int, stride: Any
) -> None:
    """Fill ``out``; all arrays are flat, ``stride`` is a uint64."""
    count, width, own = _values(sizes)
    x = np.empty(count * width, np.float32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for sample in range(U64(samples * unit // units), U64(samples * (unit + 1) // units)):
            _load(sizes, bottom, features, sample, x)
            at = sample * stride
            for k in range(own * width):
                out[at + k] = x[k]
            at += own * width
            following = (sample + ONE) * (count - own) * width
            for i in range(ONE, count):
                ahead = following + (i - ONE) * width
                prefetch_lines(features, ahead, ahead + width)
                left, j = i * width, ZERO
                while j + FOUR <= i:
                    right = j * width
                    p0 = p1 = p2 = p3 = np.float32(0)
                    for k in range(width):
                        value = x[left + k]
                        p0 += value * x[right + k]
                        p1 += value * x[right + width + k]
                        p2 += value * x[right + width + width + k]
                        p3 += value * x[right + width + width + width + k]
                    out[at], out[at + ONE], out[at + ONE + ONE], out[at + FOUR - ONE] = p0, p1, p2, p3
                    at += FOUR
                    j += FOUR
                while j < i:
                    p0 = np.float32(0)
                    for k in range(width):
                        p0 += x[left + k] * x[j * width + k]
                    out[at] = p0
                    at += ONE
                    j += ONE
        finish(counts)


@kernel(fastmath=ANY_ORDER)
def _dot_gradients(
    counts: Any,
    units: int,
    sizes: Any,
    bottom: Any,
    features: Any,
    gradient: Any,
    to_bottom: Any,
    to_features: Any,
    samples: int,
    stride: Any,
) -> None:
    """Fill the gradients of the vectors; all arrays are flat, ``stride`` is a uint64."""
    count, width, own = _values(sizes)
    whole = (count - own) // TILE * TILE
    x, one = np.empty(count * width, np.float32), np.empty(width, np.float32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for sample in range(U64(samples * unit // units), U64(samples * (unit + 1) // units)):
            _load(sizes, bottom, features, sample, x)
            start, row = sample * stride, sample * (count - own) * width
            pairs = start + own * width
            if own:
                sum_partners(sizes[1], ONE_ROW, gradient, pairs, ZERO, count, x, one, ZERO)
                for k in range(width):
                    to_bottom[sample * width + k] = one[k] + gradient[start + k]
            prefetch_lines(gradient, start + stride, start + stride + stride)
            for i in range(ZERO, whole, TILE):
                ahead = row + (count - own + i) * width
                prefetch_lines(features, ahead, ahead + TILE * width)
                prefetch_lines(to_features, ahead, ahead + TILE * width)
                sum_partners(sizes[1], ROWS_OF_TILE, gradient, pairs, own + i, count, x, to_features, row + i * width)
            sum_partners(sizes[1], sizes[3], gradient, pairs, own + whole, count, x, to_features, row + whole * width)
        finish(counts)
