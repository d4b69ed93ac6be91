"""The dense half of a DLRM: bottom MLP, interaction, top MLP to one logit. It knows no parallelism.

Shapes: n samples, F dense features, T features of ids, D the width of all pooled rows side by side, E one's width.

Source: Naumov et al., Deep Learning Recommendation Model, arXiv 1906.00091; Wang et al., DCN V2, WWW 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm_api.model import ModelSpec
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.model.device_pairs import DevicePairs, pair_places
from dlrm_trainer.model.layers import Layers
from dlrm_trainer.model.pairs import Pairs
from dlrm_trainer.model.products import product_type


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
