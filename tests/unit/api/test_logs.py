import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from dlrm_api.process import EventFormatter


class Log:
    """A logger whose lines go to a buffer."""

    def __init__(self) -> None:
        self._written = io.StringIO()
        self.logger = logging.Logger("of a test")
        handler = logging.StreamHandler(self._written)
        handler.setFormatter(EventFormatter("rank 3"))
        self.logger.addHandler(handler)

    @property
    def lines(self) -> Iterator[str]:
        """Without their times."""
        return (line.partition("rank 3")[2] for line in self._written.getvalue().splitlines())


@pytest.mark.parametrize(
    ("extra", "end"),
    [
        (None, ""),
        ({"step": 5, "bytes": 70}, " step=5 bytes=70"),
        ({"problem": "a chunk is gone", "step": 5}, ' problem="a chunk is gone" step=5'),
        ({"why": 'told "no"\nthen left'}, r' why="told \"no\"\nthen left"'),
        ({"why": ""}, ' why=""'),
        ({"k8s_ref": {"name": "demo"}, "k8s_skip": True, "settings": object(), "step": 5}, " step=5"),
    ],
    ids=["none", "plain", "spaces", "quotes and lines", "empty", "kopf's own"],
)
def test_what_an_event_says_of_itself_stands_behind_its_message_on_one_line(
    extra: dict[str, Any] | None, end: str
) -> None:
    log = Log()

    log.logger.warning("snapshot of %s passed over", "demo", extra=extra)

    assert list(log.lines) == [f" WARNING snapshot of demo passed over{end}"]


def test_a_traceback_comes_after_what_the_event_says_of_itself() -> None:
    log = Log()
    try:
        raise ValueError("boom")
    except ValueError:
        log.logger.exception("a turn failed", extra={"job": "ads/demo"})

    first, second, *_ = log.lines

    assert first == " ERROR a turn failed job=ads/demo"
    assert second == ""
    assert "ValueError: boom" in log._written.getvalue()
