"""Read samples in an order that is a pure function of (seed, epoch), the same at every world size."""

from dlrm_trainer.data.files import Split
from dlrm_trainer.data.reader import READERS, Batch, Reader, list_data, open_reader

__all__ = ["READERS", "Batch", "Reader", "Split", "list_data", "open_reader"]
