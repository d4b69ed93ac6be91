"""Fit scikit-learn's logistic regression on the same features and split, and print its AUC, to compare with.

python examples/movielens/baseline.py movielens-data/
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

BAD_DATA, NO_INPUT = 65, 66
"""Exit codes, as dlrmctl's."""
IDS = {"user": 943, "item": 1_682, "occupation": 21, "gender": 2, "age_group": 7, "hour": 24, "weekday": 7}
GENRES = 19
DENSE = ("age", "film_age")


def features(table: Any) -> sp.csr_matrix:
    """One column an id of each feature, one a genre, one a dense value: (n, columns)."""
    rows = np.arange(table.num_rows)
    ones = np.ones(table.num_rows)
    blocks = [
        sp.csr_matrix((ones, (rows, table[name].to_numpy())), shape=(table.num_rows, size))
        for name, size in IDS.items()
    ]
    genres = table["genres"].combine_chunks()
    sizes = np.diff(genres.offsets.to_numpy())
    bags = (np.ones(int(sizes.sum())), (np.repeat(rows, sizes), genres.flatten().to_numpy()))
    blocks.append(sp.csr_matrix(bags, shape=(table.num_rows, GENRES)))
    blocks += [sp.csr_matrix(dense_input(table[name].to_numpy())[:, None]) for name in DENSE]
    return sp.hstack(blocks, format="csr")


def dense_input(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Transform dense values as the job does: 0 for a missing one, then log(1 + max(x, 0))."""
    return np.log1p(np.maximum(np.nan_to_num(values), 0))


def prepared(path: Path) -> Any:
    """Read a table that prepare.py wrote; exit if it is missing."""
    words = "give the folder that prepare.py wrote"
    columns = {"label", "genres", *IDS, *DENSE}
    try:
        table = pq.read_table(path)
    except OSError:
        print(f"baseline.py: error: {path}: no such file: {words}", file=sys.stderr)
        sys.exit(NO_INPUT)
    except pa.ArrowInvalid as error:
        print(f"baseline.py: error: {path}: this is no Parquet: {error}: {words}", file=sys.stderr)
        sys.exit(BAD_DATA)
    if missing := columns - set(table.column_names):
        print(f"baseline.py: error: {path}: has no column {min(missing)}: {words}", file=sys.stderr)
        sys.exit(BAD_DATA)
    return table


def main() -> None:
    """Fit on train.parquet, score eval.parquet, print one JSON object."""
    parser = argparse.ArgumentParser(description="Logistic regression on the prepared MovieLens data.")
    parser.add_argument("folder", type=Path, help="folder with train.parquet and eval.parquet")
    parser.add_argument("--inverse-penalty", type=float, default=1.0, help="C of scikit-learn (its default is 1)")
    arguments = parser.parse_args()
    train, evaluation = (prepared(arguments.folder / f"{name}.parquet") for name in ("train", "eval"))
    model = LogisticRegression(C=arguments.inverse_penalty, max_iter=2_000)
    model.fit(features(train), train["label"].to_numpy())
    labels = evaluation["label"].to_numpy()
    scores = model.predict_proba(features(evaluation))[:, 1]
    base_rate = labels.mean()
    entropy = -(base_rate * np.log(base_rate) + (1 - base_rate) * np.log(1 - base_rate))
    print(json.dumps({
        "model": "scikit-learn LogisticRegression",
        "auc": roc_auc_score(labels, scores),
        "log_loss": log_loss(labels, scores),
        "ne": log_loss(labels, scores) / entropy,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
