"""Rows to codes: bytes a second on one core against fbgemm and torch, and the error of what comes back."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import fbgemm_gpu  # noqa: F401  its operators
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measure import Line, Pairs, seconds_of, take_turns, tell
from dlrm_api.checkpoint import Bits
from dlrm_checkpointer.codec.rows import QUANTIZERS, body_shape, code_rows, decode_rows
from dlrm_checkpointer.types import ShardId, ShardRows
from dlrm_kernels import quantize

WIDTH = 64
PLAIN = (1, 0)
DRAWS = ("gaussian", "laplace")
ROUNDS_OF_MEANS = 15
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    """Describe a line about codes."""

    bits: Bits
    search: str
    draw: str
    rows: int
    against: str
    benchmark: ClassVar[str] = "quantizing"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {"bits": self.bits, "search": self.search, "draw": self.draw, "rows": self.rows, "dim": WIDTH}

    @property
    def name(self) -> str:
        """Return the name that ``--only`` matches."""
        return f"{self.bits}/{self.search}/{self.draw}/{self.against}"


def lines(quick: bool, only: str = "*") -> Iterator[Line]:
    """Measure, line by line; ``quick`` tries it on few rows."""
    torch.set_num_threads(1)
    rows, repeats = (4_096, 3) if quick else (131_072, 15)
    searched = rows // 16
    speeds: list[tuple[Setting, Callable[[torch.Tensor], object]]] = [
        (Setting(8, "plain", "gaussian", rows, "fbgemm"), torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized),
        (Setting(4, "plain", "gaussian", rows, "fbgemm"), lambda x: _half_low(x, 4)),
        (Setting(2, "adaptive", "gaussian", searched, "torch-optimized-qparams"), _torch_searched),
    ]
    for setting, theirs in speeds:
        if fnmatch.fnmatch(setting.name, only):
            yield _speed(setting, theirs, repeats)
    for draw in DRAWS:
        for bits in (2, 3, 4):
            for against, contender in CONTENDERS.items():
                setting = Setting(bits, "adaptive", draw, searched, against)
                if fnmatch.fnmatch(setting.name, only):
                    yield _error(setting, contender, 2 if quick else 5)


def _speed(setting: Setting, theirs: Callable[[torch.Tensor], object], repeats: int) -> Line:
    """Seconds of each side in turn on the same rows, whose memory for codes was used before (theirs is torch's own)."""
    rows = drawn(setting.draw, setting.rows, 0)
    given, ours, weights = torch.from_numpy(rows), _coder(setting, rows), np.zeros_like(rows)
    coded = code_rows(piece(rows), setting.bits)[0]
    pairs = take_turns(ours, lambda: theirs(given), repeats, time.perf_counter)
    decoding = [seconds_of(lambda: decode_rows(coded, weights)) for _ in range(repeats)]
    decoded = coded.body.shape[0] * WIDTH * 4 / float(np.median(decoding))
    return Line(
        setting=setting,
        metric="quantize_bytes_per_s",
        pairs=pairs.inverted(rows.nbytes),
        measured={"decoded_bytes_per_s": decoded},
    )


def _coder(setting: Setting, rows: Rows) -> Callable[[], object]:
    """Encode rows completely; for plain 4-bit codes, which snapshots do not use, run the loop alone."""
    body = np.zeros(body_shape(setting.bits, *rows.shape), np.uint8)
    if setting.search == "adaptive" or setting.bits == 8:
        return lambda: code_rows(piece(rows), setting.bits, body.reshape(-1))
    scale, low, exponents = np.zeros(len(rows), np.uint16), np.zeros(len(rows), np.uint16), np.zeros(len(rows), np.int8)
    return lambda: quantize.code_rows(rows, setting.bits, *PLAIN, body, scale, low, exponents)


def _error(setting: Setting, contender: Callable[[Rows, Bits], Rows], repeats: int) -> Line:
    """Mean over rows of the L2 distance between a row and what comes back; other rows in each repeat."""
    pairs = Pairs()
    for seed in range(repeats):
        rows = drawn(setting.draw, setting.rows, seed)
        back = np.empty_like(rows)
        for coded in code_rows(piece(rows), setting.bits):
            back[coded.row_ids] = decode_rows(coded).rows
        pairs.add(_distance(rows, back), _distance(rows, contender(rows, setting.bits)))
    return Line(setting=setting, metric="quantize_l2_error", pairs=pairs)


def drawn(draw: str, rows: int, seed: int) -> Rows:
    """Rows as embeddings are: of a hundredth or so."""
    source = np.random.default_rng(seed)
    make = {"gaussian": source.normal, "laplace": source.laplace}[draw]
    return make(0, 0.01, (rows, WIDTH)).astype(np.float32)


def piece(rows: Rows) -> ShardRows:
    """Return rows in the form in which a rank hands them over."""
    return ShardRows(
        shard=ShardId(table="t", row_start=0, row_end=len(rows), column_start=0, column_end=WIDTH),
        row_ids=np.arange(len(rows), dtype=np.int64),
        rows=rows,
        state=np.ones((len(rows), 1), np.float32),
    )


def asymmetric(rows: Rows, bits: Bits) -> Rows:
    """Over each row's whole range."""
    low = rows.min(axis=1, keepdims=True)
    step = np.ptp(rows, axis=1, keepdims=True) / np.float32(2**bits - 1)
    back: Rows = np.rint((rows - low) / step) * step + low
    return back


def symmetric(rows: Rows, bits: Bits) -> Rows:
    """Over each row's largest magnitude, around 0."""
    top = 2 ** (bits - 1) - 1
    step = np.abs(rows).max(axis=1, keepdims=True) / np.float32(top)
    back: Rows = np.clip(np.rint(rows / step), -top, top) * step
    return back


def k_means(rows: Rows, bits: Bits) -> Rows:
    """2**bits values for each row, found by Lloyd's rounds from evenly spaced ones: the best nearly, and slow."""
    spread = np.linspace(0, 1, 2**bits, dtype=np.float32)
    centres = rows.min(axis=1, keepdims=True) + np.ptp(rows, axis=1, keepdims=True) * spread
    for _ in range(ROUNDS_OF_MEANS):
        nearest = np.abs(rows[:, :, None] - centres[:, None, :]).argmin(axis=2)
        chosen = nearest[:, :, None] == np.arange(2**bits)
        counts = chosen.sum(axis=1)
        sums = (chosen * rows[:, :, None]).sum(axis=1)
        centres = np.where(counts > 0, sums / np.maximum(counts, 1), centres).astype(np.float32)
    nearest = np.abs(rows[:, :, None] - centres[:, None, :]).argmin(axis=2)
    return np.take_along_axis(centres, nearest, axis=1)


CONTENDERS: dict[str, Callable[[Rows, Bits], Rows]] = {
    "asymmetric": asymmetric,
    "symmetric": symmetric,
    "k-means": k_means,
}


def _half_low(rows: torch.Tensor, bits: int) -> object:
    return torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits)


def _torch_searched(rows: torch.Tensor) -> object:
    """``torch.choose_qparams_optimized`` for each row, with our search's numbers, and the codes: all of it in C++."""
    searching: Any = QUANTIZERS[2]
    bins, shrinks = searching.bins, searching.shrinks
    return torch.ops.quantized.embedding_bag_2bit_prepack(rows, True, bins, (shrinks + 1) / bins)


def _distance(rows: Rows, back: Rows) -> float:
    return float(np.linalg.norm(back.astype(np.float64) - rows, axis=1).mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows: does it run here?")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="BITS/SEARCH/DRAW/AGAINST")
    options = parser.parse_args(arguments)
    tell("one thread each")
    for line in lines(options.quick, options.only):
        line.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
