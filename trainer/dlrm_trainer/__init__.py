"""Data plane: trains a DLRM as its plan says."""
