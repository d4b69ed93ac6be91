"""Turn MovieLens 100K into Parquet files for training and evaluation, split by time.

``python examples/movielens/prepare.py ml-100k/ runs/movielens-data/``

The first folder holds u.data, u.item and u.user, either as GroupLens distributes them (tabs in u.data, no headers,
Latin-1) or separated by '|' with headers (UTF-8). The first 80 % of the ratings by time become train.parquet, the rest
eval.parquet: a model that is judged on the future must not have seen it. The label is 1 for four or five stars.

MovieLens 100K: F. Maxwell Harper and Joseph A. Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4),
2015.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

BAD_DATA, NO_INPUT, DEVICE = 65, 66, 74
"""Exit codes, as dlrmctl's."""
TRAIN_SHARE = 0.8
LIKED = 4
AGE_EDGES = (18, 25, 35, 45, 50, 56)
"""Lower bounds of the age groups after the first."""
SECONDS_A_DAY = 86_400
DAYS_A_YEAR = 365.25


def read_lines(path: Path, separator: str, header: str) -> list[list[str]]:
    """Fields of each line, without the header line where there is one."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    lines = [line for line in text.splitlines() if line]
    if lines[0].startswith(header):
        lines, separator = lines[1:], "|"
    return [line.split(separator) for line in lines]


def release_time(text: str) -> float:
    """Unix seconds of a release date such as 01-Jan-1995; NaN where it is not known."""
    if not text:
        return float("nan")
    return datetime.strptime(text, "%d-%b-%Y").replace(tzinfo=UTC).timestamp()


def samples(folder: Path) -> pa.Table:
    """One row a rating, in order of time."""
    ratings = np.array(read_lines(folder / "u.data", "\t", "user"), dtype=np.int64)
    items = read_lines(folder / "u.item", "|", "item")
    users = read_lines(folder / "u.user", "|", "user")
    ratings = ratings[np.lexsort((ratings[:, 1], ratings[:, 0], ratings[:, 3]))]
    user, item, time = ratings[:, 0] - 1, ratings[:, 1] - 1, ratings[:, 3]
    item_place = places(np.array([int(fields[0]) - 1 for fields in items]), item)
    user_place = places(np.array([int(fields[0]) - 1 for fields in users]), user)
    occupations = sorted({fields[3] for fields in users})
    genres = [[genre for genre, flag in enumerate(fields[5:24]) if flag == "1"] for fields in items]
    released = np.array([release_time(fields[2]) for fields in items])
    ages = np.array([int(fields[1]) for fields in users])
    return pa.table({
        "label": (ratings[:, 2] >= LIKED).astype(np.int8),
        "user": user,
        "item": item,
        "genres": pa.array([genres[place] for place in item_place], type=pa.list_(pa.int64())),
        "occupation": np.array([occupations.index(fields[3]) for fields in users])[user_place],
        "gender": np.array([int(fields[2] == "F") for fields in users])[user_place],
        "age_group": np.searchsorted(AGE_EDGES, ages, side="right")[user_place],
        "hour": time // 3_600 % 24,
        "weekday": time // SECONDS_A_DAY % 7,
        "age": pa.array(ages[user_place], type=pa.float32()),
        "film_age": pa.array(
            (time - released[item_place]) / SECONDS_A_DAY / DAYS_A_YEAR, type=pa.float32(), from_pandas=True
        ),
    })  # fmt: skip


def places(ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each wanted id stands among ``ids``."""
    order = np.argsort(ids)
    found = order[np.searchsorted(ids, wanted, sorter=order).clip(max=ids.size - 1)]
    if (ids[found] != wanted).any():
        raise SystemExit(f"u.data rates id {int(wanted[ids[found] != wanted][0]) + 1}, which u.item or u.user lacks")
    return found


def failed(message: str, code: int) -> int:
    """Say what is wrong; returns the exit code."""
    print(f"prepare.py: error: {message}", file=sys.stderr)
    return code


def main() -> None:
    """Read the ratings, split them, write two files."""
    parser = argparse.ArgumentParser(description="Turn MovieLens 100K into Parquet files, split by time.")
    parser.add_argument("source", type=Path, help="folder with u.data, u.item and u.user")
    parser.add_argument("target", type=Path, help="folder to write train.parquet and eval.parquet to")
    arguments = parser.parse_args()
    try:
        table = samples(arguments.source)
    except OSError as error:
        files = "give the folder that holds u.data, u.item and u.user"
        sys.exit(failed(f"{error.filename}: {error.strerror}: {files}", NO_INPUT))
    except (ValueError, IndexError) as error:
        sys.exit(failed(f"{arguments.source}: its files are not those of MovieLens 100K: {error}", BAD_DATA))
    cut = int(table.num_rows * TRAIN_SHARE)
    for name, part in (("train", table.slice(0, cut)), ("eval", table.slice(cut))):
        path = arguments.target / f"{name}.parquet"
        try:
            arguments.target.mkdir(parents=True, exist_ok=True)
            pq.write_table(part, path)
        except OSError as error:
            sys.exit(failed(f"{path}: {error.strerror or error}: choose another folder", DEVICE))
        print(f"{path}: {part.num_rows} ratings, {np.mean(part['label'].to_numpy()):.1%} of them four or five stars")


if __name__ == "__main__":
    main()
