"""What a store holds: objects, part lists, manifests, chains and attempts, and reading any of them checked."""
