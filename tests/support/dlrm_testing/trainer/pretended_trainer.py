"""The trainer of ranks whose GPUs are pretended; messages between them go by gloo."""

from __future__ import annotations

import sys

from dlrm_testing.trainer.pretended_gpu import PRETENDED, pretended_gpu

if __name__ == "__main__":
    import dlrm_trainer.__main__
    from dlrm_trainer import train
    from dlrm_trainer.distributed import rendezvous

    train.take_device = lambda *_: PRETENDED
    rendezvous.backends = lambda _: "cpu:gloo"
    with pretended_gpu():
        sys.exit(dlrm_trainer.__main__.main())
