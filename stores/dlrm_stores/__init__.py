"""Where objects live: ``file://`` and ``s3://`` behind one protocol."""
