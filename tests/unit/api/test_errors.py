"""Characters that control a terminal are escaped; readable text is not."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.errors import visible

SAFE = "\t\n"


@given(st.text(st.characters()))
def test_no_character_is_left_that_steers_a_terminal(text: str) -> None:
    shown = visible(text)

    assert not [c for c in shown.replace("\r\n", "\n") if unicodedata.category(c) in ("Cc", "Cs") and c not in SAFE]
    assert visible(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;ZXZpbA==\x07", r"\x1b]52;c;ZXZpbA==\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        ("\U000e0041\ud800", r"\U000e0041\ud800"),
        ("100%\rok", r"100%\x0dok"),
    ],
)
def test_it_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_readable_text_stays() -> None:
    text = "naïve Ünïcode, 模型, emoji 🚀, tab\there\r\nnext line\n"

    assert visible(text) == text
