"""Fixtures that every test folder may ask for."""

pytest_plugins = ["dlrm_cluster.fixtures"]
