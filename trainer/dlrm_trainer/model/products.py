"""Matrix products of the dense half, by the library of torch's that is the faster on this processor.

torch gives float32 products on the host to MKL, whose loops for AVX-512 run on Intel's processors alone. oneDNN, to
which it gives those in bfloat16, has such loops for all makers': half the time on an AMD EPYC.

Shapes: n samples, K columns in, M columns out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ALIGNED = 16
"""float32 elements of a cache line: MKL takes half as long again where rows don't begin on one."""
INTEL = "GenuineIntel"
PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What decides which products are the fastest. Where no time was measured, torch's own choice stands."""

    maker: str
    """As x86 processors name it; empty elsewhere."""
    has_avx512: bool
    has_dot_products: bool
    """Of bfloat16, by AVX-512."""
    has_tiles: bool
    """AMX, for bfloat16."""

    @property
    def is_fast_in_bf16(self) -> bool:
        """Whether bf16 takes less time than fp32: dot products of Intel's do not."""
        return self.has_tiles or (self.has_dot_products and self.maker not in ("", INTEL))

    @property
    def prefers_onednn(self) -> bool:
        """Whether MKL has no loops for what it has."""
        return self.has_avx512 and self.maker not in ("", INTEL)


def product_type(precision: str, device: torch.device) -> torch.dtype:
    """What products are computed in on a device: float32 on a host whose processor is slower in bf16, not faster."""
    is_fast_in_bf16 = device.type != "cpu" or this_processor().is_fast_in_bf16
    return torch.bfloat16 if precision == "bf16" and is_fast_in_bf16 else torch.float32


def row_stride(width: int) -> int:
    """Elements from one row of a float32 product's factor to the next that suit the library."""
    return width if this_processor().prefers_onednn else -(-width // ALIGNED) * ALIGNED


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """A linear layer: x W' + b, and ReLU of it where ``relu`` says so.

    Args:
        x: (n, K).
        weight: (M, K), of the same type, as ``bias``.
        bias: (M,); None: nothing is added.
        relu: whether.

    Returns:
        (n, M).
    """
    if _goes_to_onednn(x):
        return _linear(x, weight, bias, "relu" if relu else "none")
    out = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    return out.relu_() if relu else out


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """(n, M) times (M, K): (n, K)."""
    if _goes_to_onednn(gradient):
        return _linear(gradient, weight.t())
    columns = weight.shape[1]
    if columns % ALIGNED == 0 or gradient.dtype != torch.float32:
        return torch.mm(gradient, weight)
    stride = -(-columns // ALIGNED) * ALIGNED
    aligned = weight.new_empty(len(weight), stride)[:, :columns].copy_(weight)
    return torch.mm(gradient, aligned, out=gradient.new_empty(len(gradient), stride)[:, :columns])


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """(n, M) and (n, K) to (M, K), whichever way round the product is the faster."""
    if _goes_to_onednn(gradient):
        if x.shape[1] < gradient.shape[1]:
            return _linear(x.t(), gradient.t()).t()
        return _linear(gradient.t(), x.t())
    return torch.mm(gradient.t(), x) if x.shape[1] % ALIGNED == 0 else torch.mm(x.t(), gradient).t()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(weight), bias, then, [], "")
    return out


def _dense(matrix: Tensor) -> Tensor:
    """Without gaps between its rows, or columns: oneDNN takes a loop without any vectors where there are some."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def _goes_to_onednn(left: Tensor) -> bool:
    is_ours = left.device.type == "cpu" and left.dtype == torch.float32 and len(left) > 0
    return is_ours and this_processor().prefers_onednn


@functools.cache
def this_processor() -> Processor:
    """The one that runs this."""
    return Processor(
        maker=maker_of(PROCESSORS.read_text() if PROCESSORS.exists() else ""),
        has_avx512=torch.cpu._is_avx512_supported(),
        has_dot_products=torch.cpu._is_avx512_bf16_supported(),
        has_tiles=torch.cpu._is_amx_tile_supported(),
    )


def maker_of(processors: str) -> str:
    """Of the first of the processors that Linux describes."""
    fields = (line.partition(":") for line in processors.splitlines())
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")
