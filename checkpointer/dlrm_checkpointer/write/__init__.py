"""Make cuts durable: upload objects, commit manifests, remove old snapshots."""
