"""Rows on a GPU: fbgemm's lookups and updates, and kernels in Triton for what fbgemm lacks."""
