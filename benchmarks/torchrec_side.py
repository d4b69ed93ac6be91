"""torchrec's DistributedModelParallel as a side: its own DLRM, or its tables under our dense half."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.datasets.utils import Batch as TheirBatch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.models import dlrm
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.shapes import RATE, Shape, job_of
from dlrm_api.model import TableSpec
from dlrm_checkpointer.codec.initializer import initial_rows, table_scale
from dlrm_trainer.data import Batch
from dlrm_trainer.model.dlrm import DLRM, build_model, global_mean_loss

HOST = torch.device("cpu")
FUSED = "fused"
"""Rows are updated in the backward pass; on a CPU they are dense parameters unless one asks for this."""
EPS = 1e-8
FUSED_CACHED = "fused_uvm_caching"
"""The same, with a part of the rows in a GPU's memory, and all in the host's."""
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
"""By precision. Our model sets for the whole process whether products of float32 take TF32."""


class TheirTables(nn.Module):
    """Run their tables under our dense half."""

    def __init__(self, tables: EmbeddingBagCollection, dense: DLRM) -> None:
        super().__init__()
        self.tables, self.dense = tables, dense

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        """(n,) logits."""
        logits: Tensor = self.dense(dense, self.tables(features).values())
        return logits


class TorchrecSide:
    """One rank that trains as torchrec does: fused row-wise Adagrad, and torch's fused Adagrad for the dense half.

    Args:
        shape: of the model.
        ranks: how many there are; their process group is initialised by now.
        sharding: table, row or column, of every table; mixed: in turn.
        our_dense: whether our dense half computes instead of theirs.
        device: where it computes.
        cached: share of the rows in the GPU's memory, with all of them on the host; None: all in ``device``'s.
    """

    def __init__(
        self,
        shape: Shape,
        ranks: int,
        sharding: str,
        our_dense: bool = False,
        device: torch.device = HOST,
        cached: float | None = None,
    ) -> None:
        self._shape, self._ranks = shape, ranks
        self._dtype = TYPES[shape.precision]
        self._our_dense = our_dense
        spec = job_of(shape).spec
        self._names = [table.name for table in spec.model.all_tables()]
        bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=shape.dim, num_embeddings=shape.rows, feature_names=[name])
                for name in self._names
            ],
            device=torch.device("meta"),
        )
        ours = build_model(spec.model, spec.training.seed)
        model = TheirTables(bags, ours) if our_dense else _their_model(bags, shape, ours, device)
        fused: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": RATE, "eps": EPS}
        if cached is not None:
            # Managed memory can hang a GPU, mapped memory does not.
            fused |= {"cache_load_factor": cached, "prefetch_pipeline": True, "uvm_host_mapped": True}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        kernel = FUSED if cached is None else FUSED_CACHED
        per_table = {name: _sharding(sharding, number, ranks, kernel) for number, name in enumerate(self._names)}
        plan = construct_module_sharding_plan(bags, per_table, sharder, ranks, ranks, device.type)
        path = "tables" if our_dense else "sparse_arch.embedding_bag_collection"
        model, path = self._trained(model, path)
        self._model = DistributedModelParallel(
            model,
            device=device,
            plan=ShardingPlan(plan={path: plan}),
            sharders=[sharder],
            init_data_parallel=ranks > 1,  # alone it needs no gradients of others: a favour to it
        )
        _fill(self._model, spec.model.all_tables(), spec.training.seed)
        dense = [each for name, each in self._model.named_parameters() if "embedding_bags" not in name]
        self._optimizer = torch.optim.Adagrad(dense, lr=RATE, eps=EPS, fused=True)

    def _trained(self, model: nn.Module, path: str) -> tuple[nn.Module, str]:
        """Return the module that is distributed, and the path of its tables."""
        return model, path

    def run(self, batches: Sequence[Batch]) -> float:
        """See ``Side``."""
        start = time.perf_counter()
        for batch in batches:
            self.step(batch)
        return time.perf_counter() - start

    def losses(self, batches: Sequence[Batch]) -> list[float]:
        """Train on the batches; return this rank's share of each loss."""
        return [float(self.step(batch)) for batch in batches]

    def step(self, batch: Batch) -> Tensor:
        """Train on a batch."""
        self._optimizer.zero_grad()
        features = KeyedJaggedTensor(
            keys=self._names, values=batch.values, lengths=batch.lengths.view(-1), stride=len(batch.labels)
        )
        # our dense half has a precision of its own
        with torch.autocast("cpu", dtype=self._dtype, enabled=self._dtype != torch.float32 and not self._our_dense):
            logits = self._model(batch.dense, features).view(-1)
        local = global_mean_loss(logits.float(), batch.labels, len(batch.labels))
        local.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return local.detach() * (len(batch.labels) / self._shape.batch)

    def close(self) -> None:
        """Leave the others."""
        dist.destroy_process_group()


class PipelinedSide(TorchrecSide):
    """One rank on a GPU, by torchrec's pipelines: batches in pinned memory are copied, and cached rows fetched, ahead.

    Args:
        shape: of the model.
        device: a GPU; the host, to try the program.
        cached: share of the rows in its memory, with all of them in mapped host memory; None: all of them.
    """

    def __init__(self, shape: Shape, device: torch.device, cached: float | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        backend = "gloo" if device == HOST else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        super().__init__(shape, 1, "table", device=device, cached=cached)
        pipeline = TrainPipelineSparseDist if cached is None else PrefetchTrainPipelineSparseDist
        self._device = device
        self._pipeline = pipeline(self._model, self._optimizer, device, execute_all_batches=True)

    def _trained(self, model: nn.Module, path: str) -> tuple[nn.Module, str]:
        # Pipelines take a batch, and find the tables' input in it.
        return dlrm.DLRMTrain(model), f"model.{path}"

    def run(self, batches: Sequence[Batch]) -> float:
        """See ``Side``; batches are pinned before the clock starts."""
        pinned = [self._pinned(batch) for batch in batches]
        self._wait()
        start = time.perf_counter()
        self._train(pinned)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device != HOST:
            torch.cuda.synchronize(self._device)

    def losses(self, batches: Sequence[Batch]) -> list[float]:
        """Train on the batches; return each loss."""
        return [float(loss) for loss, *_ in self._train([self._pinned(batch) for batch in batches])]

    def _train(self, batches: Sequence[TheirBatch]) -> list[tuple[Tensor, ...]]:
        ahead, found = iter(batches), list[tuple[Tensor, ...]]()
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            while len(found) < len(batches):
                found.append(self._pipeline.progress(ahead))
        return found

    def _pinned(self, batch: Batch) -> TheirBatch:
        features = KeyedJaggedTensor(
            keys=self._names, values=batch.values, lengths=batch.lengths.view(-1), stride=len(batch.labels)
        )
        made = TheirBatch(dense_features=batch.dense, sparse_features=features, labels=batch.labels)
        return made if self._device == HOST else made.pin_memory()


def _their_model(bags: EmbeddingBagCollection, shape: Shape, ours: DLRM, device: torch.device) -> nn.Module:
    model = dlrm.DLRM(bags, shape.features, list(shape.bottom), list(shape.top), dense_device=device)
    theirs = [each for name, each in model.named_parameters() if "embedding_bags" not in name]
    assert ours.bottom is not None
    weights = [*ours.bottom.parameters(), *ours.top.parameters()]
    with torch.no_grad():
        for their, our in zip(theirs, weights, strict=True):
            their.copy_(our)
        first, width = ours.top.layers[0].weight, shape.bottom[-1]
        assert isinstance(first, Tensor)
        theirs[2 * len(shape.bottom)][:, width:] = first[:, width:][:, _pairs(shape.tables + 1)]
    return cast(nn.Module, model)


def _pairs(vectors: int) -> Tensor:
    """Place in our lower triangle, row by row, of each pair of their upper triangle, row by row."""
    row, column = torch.triu_indices(vectors, vectors, offset=1)
    places: Tensor = column * (column - 1) // 2 + row
    return places


def _sharding(kind: str, number: int, ranks: int, kernel: str) -> Any:
    if kind == "mixed":
        kind = ("table", "row", "column")[number % 3]
    if kind == "row":
        return row_wise(compute_kernel=kernel)
    if kind == "column":
        return column_wise(ranks=list(range(ranks)), compute_kernel=kernel)
    return table_wise(rank=number % ranks, compute_kernel=kernel)


def _fill(model: DistributedModelParallel, tables: Sequence[TableSpec], seed: int) -> None:
    """Give every row the value that it starts with in our tables."""
    state = model.state_dict()
    of_table = {key.split(".")[-2]: value for key, value in state.items() if "embedding_bags" in key}
    for table in tables:
        scale = table_scale(table.initializer, table.rows)
        for shard in of_table[table.name].local_shards():
            (row, column), (rows, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            values = initial_rows(seed, table.name, np.arange(row, row + rows), range(column, column + width), scale)
            shard.tensor.copy_(torch.from_numpy(values))
