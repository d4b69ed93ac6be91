"""The dense half of a DLRM: bottom MLP, interaction, top MLP to one logit. It knows no parallelism.

Shapes: n samples, F dense features, T features of ids, D the width of all pooled rows side by side, E one's width.

Source: Naumov et al., Deep Learning Recommendation Model, arXiv 1906.00091; Wang et al., DCN V2, WWW 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dlrm_api.model import ModelSpec
from dlrm_kernels.interaction import UNIT_SAMPLES, dot_gradients, dot_products, sizes_of
from dlrm_kernels.parallel import parallel_for
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.model.dense import Layers, product_type, row_stride


def pair_places(vectors: int) -> Tensor:
    """(2, P) int64 places, in a flat matrix (V, V), of each pair below its diagonal and of its mirror image."""
    rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
    return torch.stack((rows * vectors + columns, columns * vectors + rows))


class DevicePairs(torch.autograd.Function):
    """See ``pairs.Pairs``: the same function, whose products take and give ``dtype`` and add up in float32."""

    @staticmethod
    def forward(
        ctx: Any, bottom: Tensor | None, features: Tensor, dim: int, dtype: torch.dtype, places: Tensor
    ) -> Tensor:
        """All vectors have ``dim`` elements; ``places`` are ``pair_places`` on their device."""
        samples = len(features)
        given = [features] if bottom is None else [bottom, features]
        x = torch.cat([each.to(dtype) for each in given], dim=1).view(
            samples, sum(each.shape[1] for each in given) // dim, dim
        )
        products = torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, places[0]).to(features.dtype)
        ctx.save_for_backward(x, places)
        ctx.own = 0 if bottom is None else dim
        return products if bottom is None else torch.cat((bottom, products), dim=1)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        """Gradients of the vectors. Each product has a place of its own, so that none are added in a chance order."""
        x, places = ctx.saved_tensors
        (gradient,), own = incoming, ctx.own
        samples, vectors, _ = x.shape
        of_pairs = gradient[:, own:].to(x.dtype)
        square = x.new_zeros(samples, vectors * vectors)
        for each in places:
            square.index_copy_(1, each, of_pairs)
        to_vectors = torch.bmm(square.view(samples, vectors, vectors), x).flatten(1).to(gradient.dtype)
        to_bottom = to_vectors[:, :own] + gradient[:, :own] if own else None
        return to_bottom, to_vectors[:, own:], None, None, None


class Pairs(torch.autograd.Function):
    """(n, E) or nothing, and (n, F * E), to (n, E + pairs) or (n, pairs): the first beside the products, row by row."""

    @staticmethod
    def forward(ctx: Any, bottom: Tensor | None, features: Tensor, dim: int) -> Tensor:
        """All vectors have ``dim`` elements. Rows of what it returns lie as the products that read them have it."""
        samples = len(features)
        own = 0 if bottom is None else dim
        vectors = (features.shape[1] + own) // dim
        width = own + vectors * (vectors - 1) // 2
        out = torch.empty(samples, row_stride(width), dtype=torch.float32)
        inputs = (None if bottom is None else bottom.contiguous(), features.contiguous())
        sizes = sizes_of(vectors, dim, own > 0)
        parallel_for(
            dot_products,
            _units(samples),
            torch.get_num_threads(),
            sizes,
            *_flat(*inputs),
            out.view(-1).numpy(),
            samples,
            np.uint64(out.shape[1]),
        )
        ctx.save_for_backward(*inputs)
        ctx.sizes = sizes
        return out[:, :width]

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """Gradients of the vectors."""
        bottom, features = ctx.saved_tensors
        (gradient,), samples = incoming, len(features)
        if gradient.stride(1) != 1 or gradient.stride(0) < gradient.shape[1]:
            gradient = gradient.contiguous()
        stride = gradient.stride(0)
        flat = gradient.as_strided((max(0, (samples - 1) * stride + gradient.shape[1]),), (1,))
        to_bottom = None if bottom is None else torch.empty_like(bottom)
        to_features = torch.empty_like(features)
        outputs = _flat(to_bottom, to_features)
        parallel_for(
            dot_gradients,
            _units(samples),
            torch.get_num_threads(),
            ctx.sizes,
            *_flat(bottom, features),
            flat.numpy(),
            *outputs,
            samples,
            np.uint64(stride),
        )
        return to_bottom, to_features, None


def _units(samples: int) -> int:
    return max(1, samples // UNIT_SAMPLES)


def _flat(bottom: Tensor | None, features: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    flat = features.detach().reshape(-1).numpy()
    return flat if bottom is None else bottom.detach().reshape(-1).numpy(), flat


class MLP(nn.Module):
    """Linear layers with ReLU between them; ``last_relu`` adds one at the end.

    ``dtype`` is that of the products; parameters, inputs and outputs are float32.
    """

    def __init__(self, width: int, widths: Sequence[int], last_relu: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.layers = nn.ModuleList(
            nn.Linear(before, after) for before, after in zip((width, *widths), widths, strict=False)
        )
        self.relus = (True,) * (len(widths) - 1) + (last_relu,)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) to (n, widths[-1])."""
        out: Tensor = Layers.apply(x, self.relus, self.dtype, *self.parameters())  # type: ignore[no-untyped-call]
        return out


class DotInteraction(nn.Module):
    """Dot products of all pairs of vectors: each feature's pooled row, and the bottom MLP's output where there is one.

    Without a bottom MLP the pairs are all; with it, its output goes on beside them. ``dtype`` is that of a GPU's
    products; the host's are float32.
    """

    places: Tensor

    def __init__(self, features: int, dim: int, with_dense: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        vectors = features + with_dense
        self.dim, self.dtype = dim, dtype
        self.width = vectors * (vectors - 1) // 2 + (dim if with_dense else 0)
        self.register_buffer("places", pair_places(vectors), persistent=False)

    def forward(self, bottom: Tensor | None, features: Tensor) -> Tensor:
        """(n, E) and (n, T * E) to (n, width): ``bottom`` first, then the lower triangle row by row."""
        out: Tensor
        if features.device.type == "cpu":
            out = Pairs.apply(bottom, features, self.dim)  # type: ignore[no-untyped-call]
        else:
            out = DevicePairs.apply(bottom, features, self.dim, self.dtype, self.places)  # type: ignore[no-untyped-call]
        return out


class CrossInteraction(nn.Module):
    """DCN V2's cross layers with low-rank matrices: x <- x0 * (U V x + b) + x."""

    def __init__(self, width: int, layers: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))
        self.width = width

    def forward(self, bottom: Tensor | None, features: Tensor) -> Tensor:
        """(n, bottom width) and (n, D) to (n, width)."""
        start = features if bottom is None else torch.cat((bottom, features), dim=1)
        x = start
        for down, up in zip(self.down, self.up, strict=True):
            layers = (down.weight, None, up.weight, up.bias)
            added = Layers.apply(x, (False, False), self.dtype, *layers)  # type: ignore[no-untyped-call]
            x = start * added + x
        return x


class DLRM(nn.Module):
    """Dense features and pooled rows to one logit a sample. A model without dense features has no bottom MLP."""

    def __init__(self, spec: ModelSpec, device: torch.device = HOST) -> None:
        super().__init__()
        tables = spec.all_tables()
        dims = [tables[feature.table].dim for feature in spec.all_features()]
        dense = len(spec.dense_features)
        dtype = product_type(spec.precision, device)
        self.bottom = MLP(dense, spec.bottom_mlp, last_relu=True, dtype=dtype) if dense else None
        self.interaction: DotInteraction | CrossInteraction
        if spec.interaction == "dot":
            self.interaction = DotInteraction(len(dims), dims[0], bool(dense), dtype)
        else:
            width = sum(dims) + (spec.bottom_mlp[-1] if dense else 0)
            self.interaction = CrossInteraction(width, spec.cross_layers, spec.cross_rank, dtype)
        self.top = MLP(self.interaction.width, spec.top_mlp, last_relu=False, dtype=dtype)

    def forward(self, dense: Tensor, features: Tensor) -> Tensor:
        """Logits.

        Args:
            dense: (n, F) float32; ignored where F is 0.
            features: (n, D) float32 pooled rows, features side by side in the model's order.

        Returns:
            (n,) float32.
        """
        return self.logits(self.bottom_out(dense), features)

    def bottom_out(self, dense: Tensor) -> Tensor | None:
        """The half of ``forward`` that needs no pooled rows: (n, bottom width), None without dense features."""
        return None if self.bottom is None else self.bottom(dense)

    def logits(self, bottom: Tensor | None, features: Tensor) -> Tensor:
        """The other half of ``forward``.

        Args:
            bottom: from ``bottom_out``.
            features: (n, D) float32, as for ``forward``.

        Returns:
            (n,) float32.
        """
        logits: Tensor = self.top(self.interaction(bottom, features))
        return logits.squeeze(1)


def build_model(spec: ModelSpec, seed: int, device: torch.device = HOST) -> DLRM:
    """A model with weights drawn from ``seed`` alone: every rank, at every world size, builds the same bits.

    Args:
        spec: of the model.
        seed: of its weights.
        device: that it computes on.
    """
    model = DLRM(spec, device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                outputs, inputs = module.weight.shape
                module.weight.normal_(0.0, math.sqrt(2.0 / (inputs + outputs)), generator=generator)
                if module.bias is not None:
                    module.bias.normal_(0.0, math.sqrt(1.0 / outputs), generator=generator)
    return model.to(device)


def global_mean_loss(logits: Tensor, labels: Tensor, global_count: int) -> Tensor:
    """This rank's share of the global batch's mean log loss: the shares of all ranks add up to it.

    Args:
        logits: (n,) float32; n may be 0.
        labels: (n,) float32 in {0, 1}.
        global_count: samples of the batch over all ranks.
    """
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / global_count
