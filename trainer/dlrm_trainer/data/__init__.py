"""Readers: samples in an order that is a pure function of (seed, epoch), the same at every world size."""

from dlrm_trainer.data.batch import Batch
from dlrm_trainer.data.opening import open_reader
from dlrm_trainer.data.reader import Reader, Split

__all__ = ["Batch", "Reader", "Split", "open_reader"]
