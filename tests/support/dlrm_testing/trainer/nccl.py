"""How NCCL's ranks meet, over gloo: at the first collective of a GPU, through the store of their group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dlrm_testing.trainer.pretended_gpu import PRETENDED

KEY = "cuda/0"
COLLECTIVES = ("all_reduce", "all_to_all_single")


@contextmanager
def meeting_as_nccl_does() -> Iterator[None]:
    """Make ranks ask the store for rank 0's key before their first collective on the pretended GPU, as NCCL does.

    Source: ProcessGroupNCCL::broadcastUniqueNCCLID: rank 0 sets the key, the others get it, in the store's own timeout.
    """
    met: list[bool] = []

    def as_nccl_does(made: Callable[..., Any]) -> Callable[..., Any]:
        def collective(tensor: Tensor, *rest: Any, **named: Any) -> Any:
            if tensor.device == PRETENDED and not met:
                _meet()
                met.append(True)
            return made(tensor, *rest, **named)

        return collective

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, as_nccl_does(getattr(dist, name)))
        yield


def _meet() -> None:
    store = distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(KEY, "id")
    store.get(KEY)
