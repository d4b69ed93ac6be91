"""Fixtures that every test folder may ask for, and what is said of a session as a whole."""

pytest_plugins = ["dlrm_cluster.fixtures", "rights_ledger"]
