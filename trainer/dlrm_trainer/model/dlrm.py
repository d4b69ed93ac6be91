"""Compute the dense half of a DLRM, without parallelism: MLPs, interaction, logit and loss.

Shapes: n samples, F dense features, T features of ids, D the width of all pooled rows side by side, E one's width,
V vectors of a sample that interact, P = V (V - 1) / 2 pairs of them: the lower triangle, row by row.

Source: Naumov et al., Deep Learning Recommendation Model, arXiv 1906.00091; Wang et al., DCN V2, WWW 2021.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlrm_api.model import ModelSpec, TableSpec
from dlrm_kernels.interaction import dot_gradients, dot_products
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.model.dense import allow_tf32, linear, product_dtype


class MLP(nn.Module):
    """Linear layers with ReLU between them; ``last_relu`` adds one at the end.

    ``dtype`` is that of the products; parameters, inputs and outputs are float32.
    """

    def __init__(self, width: int, widths: Sequence[int], last_relu: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.last_relu = dtype, last_relu
        self.layers = nn.ModuleList(itertools.starmap(nn.Linear, itertools.pairwise((width, *widths))))

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) to (n, widths[-1])."""
        for number, layer in enumerate(self.layers, start=1):
            x = linear(x, layer, self.dtype)
            if self.last_relu or number < len(self.layers):
                x = nn.functional.relu(x, inplace=True)
        return x.float()


class DotInteraction(nn.Module):
    """Compute the dot products of all pairs of a sample's pooled rows and its bottom MLP output, if any.

    That output is also passed on unchanged. ``dtype`` is that of a GPU's products; the host's are float32.
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
            out = HostPairs.apply(bottom, features, self.dim)  # type: ignore[no-untyped-call]
        else:
            out = DevicePairs.apply(bottom, features, self.dim, self.dtype, self.places)  # type: ignore[no-untyped-call]
        return out


class HostPairs(torch.autograd.Function):
    """Dot products of all pairs on the host, by compiled loops that compute the lower triangle only.

    A general matrix product computes every product twice, and picking one of them and its gradient are passes of
    their own.
    """

    @staticmethod
    def forward(ctx: Any, bottom: Tensor | None, features: Tensor, dim: int) -> Tensor:
        """(n, E) or nothing, and (n, T * E), to (n, E + P) or (n, P)."""
        inputs = (None if bottom is None else bottom.contiguous(), features.contiguous())
        ctx.save_for_backward(*inputs)
        ctx.dim = dim
        vectors = features.shape[1] // dim + (bottom is not None)
        out = torch.empty(len(features), (0 if bottom is None else dim) + vectors * (vectors - 1) // 2)
        dot_products(_array(inputs[0]), _array(inputs[1]), out.numpy(), dim, torch.get_num_threads())
        return out

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """Return gradients of the vectors."""
        (bottom, features), (gradient,) = ctx.saved_tensors, incoming
        to_bottom, to_features = None if bottom is None else torch.empty_like(bottom), torch.empty_like(features)
        given = _array(bottom), _array(features), _array(gradient.contiguous())
        dot_gradients(*given, _array(to_bottom), _array(to_features), ctx.dim, torch.get_num_threads())
        return to_bottom, to_features, None


class DevicePairs(torch.autograd.Function):
    """Do what ``HostPairs`` does on a GPU, by products that take and give ``dtype`` and add up in float32."""

    @staticmethod
    def forward(
        ctx: Any, bottom: Tensor | None, features: Tensor, dim: int, dtype: torch.dtype, places: Tensor
    ) -> Tensor:
        """See ``HostPairs``; ``places`` are ``pair_places`` on the device."""
        given = [features] if bottom is None else [bottom, features]
        vectors = sum(each.shape[1] for each in given) // dim
        x = torch.cat([each.to(dtype) for each in given], dim=1).view(len(features), vectors, dim)
        products = torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, places[0]).to(features.dtype)
        ctx.save_for_backward(x, places)
        ctx.own = 0 if bottom is None else dim
        return products if bottom is None else torch.cat((bottom, products), dim=1)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        """Return gradients of the vectors."""
        x, places = ctx.saved_tensors
        (gradient,), own = incoming, ctx.own
        samples, vectors, _ = x.shape
        of_pairs = gradient[:, own:].to(x.dtype)
        square = x.new_zeros(samples, vectors * vectors)
        # Each product has a place of its own: none are added in an order left to chance.
        for each in places:
            square.index_copy_(1, each, of_pairs)
        to_vectors = torch.bmm(square.view(samples, vectors, vectors), x).flatten(1).to(gradient.dtype)
        to_bottom = to_vectors[:, :own] + gradient[:, :own] if own else None
        return to_bottom, to_vectors[:, own:], None, None, None


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().numpy()


def pair_places(vectors: int) -> Tensor:
    """Return (2, P) int64 places in a flat (V, V) matrix: of each pair below the diagonal, and its mirror."""
    rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
    return torch.stack((rows * vectors + columns, columns * vectors + rows))


class CrossInteraction(nn.Module):
    """DCN V2's cross layers with low-rank matrices: x <- x0 * (U V x + b) + x."""

    def __init__(self, width: int, layers: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))

    def forward(self, bottom: Tensor | None, features: Tensor) -> Tensor:
        """(n, bottom width) and (n, D) to (n, width)."""
        start = x = features if bottom is None else torch.cat((bottom, features), dim=1)
        for down, up in zip(self.down, self.up, strict=True):
            added = linear(linear(x, down, self.dtype), up, self.dtype)
            x = start * added.float() + x
        return x


class Projections(nn.ModuleDict):
    """Give all pooled rows of a sample the width E: those of a table with ``project`` by its own matrix.

    Matrices are named by the table's number: torch permits no dots, which names of tables may have. ``dtype`` is that
    of the products; parameters, inputs and outputs are float32.
    """

    def __init__(self, tables: Sequence[TableSpec], width: int, dtype: torch.dtype) -> None:
        projected = {str(i): table.dim for i, table in enumerate(tables) if table.project}
        super().__init__({name: nn.Linear(dim, width, bias=False) for name, dim in projected.items()})
        self.dtype = dtype
        self.counts = [len(table.sources) for table in tables]
        self.columns = [table.dim * count for table, count in zip(tables, self.counts, strict=True)]

    def forward(self, features: Tensor) -> Tensor:
        """(n, D) to (n, T * E)."""
        samples, parts = len(features), list(torch.split(features, self.columns, dim=1))
        for name, matrix in self.items():
            assert isinstance(matrix, nn.Linear)
            table, count = int(name), self.counts[int(name)]
            bags = parts[table].reshape(samples * count, matrix.in_features)
            parts[table] = linear(bags, matrix, self.dtype).float().view(samples, count * matrix.out_features)
        return torch.cat(parts, dim=1)


class DLRM(nn.Module):
    """Turn dense features and pooled rows into logits. Without dense features there is no bottom MLP."""

    def __init__(self, spec: ModelSpec, device: torch.device = HOST) -> None:
        super().__init__()
        tables = spec.all_tables()
        dense = len(spec.dense_features)
        dtype = product_dtype(spec.precision, device)
        self.bottom = MLP(dense, spec.bottom_mlp, last_relu=True, dtype=dtype) if dense else None
        self.interaction: DotInteraction | CrossInteraction
        if spec.interaction == "dot":
            count = len(spec.all_features())
            self.interaction = DotInteraction(count, spec.common_width, bool(dense), dtype)
        else:
            width = sum(table.dim * len(table.sources) for table in tables) + (spec.bottom_mlp[-1] if dense else 0)
            self.interaction = CrossInteraction(width, spec.cross_layers, spec.cross_rank, dtype)
        has_projections = any(table.project for table in tables)
        self.projections = Projections(tables, spec.common_width, dtype) if has_projections else None
        self.top = MLP(self.interaction.width, spec.top_mlp, last_relu=False, dtype=dtype)

    def forward(self, dense: Tensor, features: Tensor) -> Tensor:
        """Return (n,) logits from dense features (n, F) and pooled rows (n, D) in order, all float32."""
        return self.logits(self.bottom_out(dense), features)

    def bottom_out(self, dense: Tensor) -> Tensor | None:
        """Compute the half of ``forward`` that needs no pooled rows: (n, bottom width) or None."""
        return None if self.bottom is None else self.bottom(dense)

    def logits(self, bottom: Tensor | None, features: Tensor) -> Tensor:
        """Compute the other half of ``forward`` from what ``bottom_out`` returned."""
        if self.projections is not None:
            features = self.projections(features)
        logits: Tensor = self.top(self.interaction(bottom, features))
        return logits.squeeze(1)


def build_model(spec: ModelSpec, seed: int, device: torch.device = HOST) -> DLRM:
    """Build a model on ``device`` with weights drawn from ``seed`` alone: the same bits on every rank."""
    allow_tf32(spec.precision, device)
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
    """Return this rank's share of the global batch's mean log loss: the shares of all ranks add up to it.

    ``logits`` and ``labels`` are (n,) float32, n may be 0; ``global_count`` are samples of the batch over all ranks.
    """
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / global_count
