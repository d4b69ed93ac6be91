"""Readers: samples in an order that is a pure function of (seed, epoch), the same at every world size."""

from dlrm_trainer.data.reader import Batch, Reader, Split, open_reader

__all__ = ["Batch", "Reader", "Split", "open_reader"]
