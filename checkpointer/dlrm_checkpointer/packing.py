"""Codes below eight bits, several to a byte: compiled loops over rows.

A row's bytes hold its codes in planes, so that loops over bytes run in vectors: with P bytes a plane, byte i holds the
codes of columns i, i + P, i + 2 P and so on, the first in its lowest bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_checkpointer.compiled import compiled

U8, F32 = np.uint8, np.float32


@compiled
def pack_row(codes: Any, width: Any, bits: Any, body: Any) -> None:
    """Pack a row's ``width`` codes, one a byte, into its bytes.

    Args:
        codes: (C,) uint8, C >= width + 8, zeros from ``width`` on.
        width: columns.
        bits: 2, 3, 4 or 8.
        body: (P,) uint8, written.
    """
    if bits == 8:
        for i in range(width):
            body[i] = codes[i]
        return
    if bits == 4:
        plane = (width + 1) // 2
        second = codes[plane:]
        for i in range(plane):
            body[i] = codes[i] | U8(second[i] << U8(4))
        return
    plane = (width + 3) // 4
    second, third, fourth = codes[plane:], codes[2 * plane :], codes[3 * plane :]
    for i in range(plane):
        pair = (codes[i] & U8(3)) | U8((second[i] & U8(3)) << U8(2))
        body[i] = pair | U8((third[i] & U8(3)) << U8(4)) | U8((fourth[i] & U8(3)) << U8(6))
    if bits == 3:
        tops, plane = body[plane:], (width + 7) // 8
        for i in range(plane):
            tops[i] = U8(0)
        for k in range(8):
            part, place = codes[min(k * plane, width) :], U8(k)
            for i in range(plane):
                tops[i] |= U8(U8(part[i] >> U8(2)) << place)


@compiled
def unpack_row(body: Any, width: Any, bits: Any, codes: Any) -> None:
    """The other way round: ``codes`` (C,) uint8, C >= width + 8, of which ``width`` mean something afterwards."""
    if bits == 8:
        for i in range(width):
            codes[i] = body[i]
        return
    if bits == 4:
        plane = (width + 1) // 2
        second = codes[plane:]
        for i in range(plane):
            codes[i] = body[i] & U8(15)
            second[i] = body[i] >> U8(4)
        return
    plane = (width + 3) // 4
    for k in range(4):
        part, place = codes[k * plane :], U8(2 * k)
        for i in range(plane):
            part[i] = U8(body[i] >> place) & U8(3)
    if bits == 3:
        tops, plane = body[plane:], (width + 7) // 8
        for k in range(8):
            part, place = codes[min(k * plane, width) :], U8(k)
            for i in range(plane):
                part[i] |= U8(U8(U8(tops[i] >> place) & U8(1)) << U8(2))


@compiled
def unpack(body: Any, bits: Any, codes: Any) -> None:
    """Codes of rows, one a byte: ``body`` (N, P) uint8 into ``codes`` (N, W) uint8."""
    width = codes.shape[1]
    scratch = np.empty(2 * width + 8, np.uint8)
    for row in range(codes.shape[0]):
        unpack_row(body[row], width, bits, scratch)
        for i in range(width):
            codes[row, i] = scratch[i]


@compiled
def pack(codes: Any, bits: Any, body: Any) -> None:
    """The other way round."""
    width = codes.shape[1]
    scratch = np.zeros(2 * width + 8, np.uint8)
    for row in range(codes.shape[0]):
        for i in range(width):
            scratch[i] = codes[row, i]
        pack_row(scratch, width, bits, body[row])


@compiled
def decode(body: Any, bits: Any, steps: Any, lows: Any, rows: Any) -> None:
    """Weights of codes: float32(code) * step, then + low, each rounded to float32.

    Args:
        body: (N, P) uint8.
        bits: 2, 3, 4 or 8.
        steps: (N,) float32.
        lows: (N,) float32.
        rows: (N, W) float32, written.
    """
    width = rows.shape[1]
    codes = np.empty(2 * width + 8, np.uint8)
    for i in range(rows.shape[0]):
        step, low, row = steps[i], lows[i], rows[i]
        unpack_row(body[i], width, bits, codes)
        for j in range(width):
            row[j] = F32(codes[j]) * step + low
