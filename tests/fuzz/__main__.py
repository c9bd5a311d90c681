"""``python -m tests.fuzz --runs 2000 --seed 0``: see run.py."""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from flextrain.testing import WorkerGroup

from .run import STRATEGIES, TIMEOUT_S, fuzz, summary


def main() -> int:
    """Fuzz, print the tables, and return 1 if a run was wrong or ended in a raw error."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="cases, each under one strategy")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case; the next one has the next seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    given = parser.parse_args()
    started = time.monotonic()
    with WorkerGroup(2, TIMEOUT_S, imports=("deepspeed",)) as workers:
        results = fuzz(range(given.seed, given.seed + given.runs), given.strategies, workers, given.seconds)
    print(summary(results))
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(result.kind in ("wrong", "raw") for result in results))


if __name__ == "__main__":
    sys.exit(main())
