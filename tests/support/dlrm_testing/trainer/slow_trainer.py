"""The trainer with a fault: ``FAULT`` in the environment says in which rank, in what, from which batch, how long.

Run as ``python slow_trainer.py`` with the trainer's arguments; ``FAULT="2 read 20 0.05"``: rank 2's reader sleeps
0.05 s before each batch from 20 on, until a file is there that ``UNTIL`` names, if it names any. A fault in ``send``
is an error in the thread that sends ids.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import dlrm_trainer.__main__
from dlrm_trainer.data import Batch
from dlrm_trainer.data.reader import Reader
from dlrm_trainer.embedding.exchange import Exchange

RANK, WHERE, FIRST, SECONDS = os.environ["FAULT"].split()
UNTIL = Path(os.environ["UNTIL"]) if "UNTIL" in os.environ else None
make_batch, send_ids, make_exchange = Reader._batch, Exchange.send_ids, Exchange.__init__


def slow_batch(reader: Reader, number: int, *arguments: Any) -> Batch:
    if reader._rank == int(RANK) and number >= int(FIRST) and not (UNTIL and UNTIL.exists()):
        time.sleep(float(SECONDS))
    return make_batch(reader, number, *arguments)


def make_faulty_exchange(exchange: Exchange, placement: Any, collectives: Any, *arguments: Any) -> None:
    make_exchange(exchange, placement, collectives, *arguments)
    sent = 0

    def send(bags: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent > int(FIRST):
            raise ZeroDivisionError("planted in the thread that sends ids")
        return send_ids(exchange, bags)

    if collectives.rank == int(RANK):
        exchange.send_ids = send  # type: ignore[method-assign]


if WHERE == "read":
    Reader._batch = slow_batch  # type: ignore[method-assign]
else:
    Exchange.__init__ = make_faulty_exchange  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    sys.exit(dlrm_trainer.__main__.main())
