"""Requests that outlast a reconcile: they run in the background, a later reconcile sees the answer."""
