"""The control token of an attempt: whoever asks its gang for a cut shows it, and the gang knows its digest alone."""

from __future__ import annotations

import hashlib


def token_digest(token: str) -> str:
    """SHA-256 of a token in hexadecimal digits, as ``Env.TOKEN_SHA256`` gives it to the trainer."""
    return hashlib.sha256(token.encode()).hexdigest()
