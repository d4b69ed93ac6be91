"""Define what a store holds: objects, part lists, manifests, chains and attempts."""
