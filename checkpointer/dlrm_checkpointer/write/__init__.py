"""Cuts made durable: objects, part lists, manifests, and what is removed."""
