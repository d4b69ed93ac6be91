"""Texts of others, such as a pod's last words, made safe to show: no character of them steers a terminal."""

from __future__ import annotations

import re

_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1: escape sequences begin here
    "\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
    "\ud800-\udfff]"  # halves of pairs: no terminal and no file takes them
    "|\r(?!\n)"
)
"""Characters that steer a terminal, or turn the order of what stands beside them, or are not seen at all."""


def visible(text: str) -> str:
    r"""The text with such characters written out, as in ``\x1b``; tabs and line ends stay. Twice is the same."""
    return _UNSEEN.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
