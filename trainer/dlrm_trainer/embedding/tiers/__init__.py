"""Hierarchical memory: rows of large tables in slots that the kernels compute on, and in slower levels below them."""
