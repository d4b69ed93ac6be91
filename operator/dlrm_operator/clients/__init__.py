"""Requests that take longer than a reconcile may: asked in the background, a later reconcile sees the answer."""
