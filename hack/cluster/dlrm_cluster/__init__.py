"""A real Kubernetes control plane and real S3 servers for tests."""
