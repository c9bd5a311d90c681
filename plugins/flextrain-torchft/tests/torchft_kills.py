"""Kills groups at random moments of a training, and checks it: ``python torchft_kills.py --groups 3 --kills 50 --folder FOLDER``."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchft_checks import check_groups, ends, lines_of, one_device, start

SAMPLES = 1000  # 84 updates of an epoch, a few seconds
EVERY_S = 6.0


def kill_at_random(folder: Path, lighthouse: str, groups: int, kills: int, seed: int) -> list[float]:
    """Kill a group every few seconds, start it again at once, and compare the outcome with one device.

    A moment is any from the first update that a group waits for on, while it gets a checkpoint too. One other group has trained since its
    start, because it alone has the weights.

    Returns:
        Of each kill, the longest time between it and the next one in which no group made an update, in seconds.
    """
    chance = random.Random(seed)
    more: dict[str, Any] = dict(
        samples=SAMPLES, train_cfg=dict(max_epochs=kills + 2), param_scheduler=[],
        default_hooks=dict(logger=dict(interval=50), checkpoint=dict(interval=kills)),
    )  # fmt: skip
    folders = [folder / f"group_{number}" for number in range(groups)]

    def begin(one: Path) -> Any:
        (one / "arrived").unlink(missing_ok=True)
        return start(one, lighthouse, exchange_timeout_s=10.0, events=dict(pause=0.05), more=more)

    processes = {one: begin(one) for one in folders}
    began = dict.fromkeys(folders, time.time())
    killed = list[float]()
    try:
        while len(killed) < kills:
            time.sleep(chance.uniform(0.5, 2 * EVERY_S - 0.5) if killed else 0.5)
            if any(process.poll() is not None for process in processes.values()):
                break  # at the end of the training, or by an error, which is told below
            arrived = [one for one in folders if (one / "arrived").exists()]
            trained = {one for one in arrived if _last_update(one) > began[one]}
            if (
                not arrived
                or not trained - {victim := chance.choice(arrived)}
                or (not killed and len(trained) < groups)
            ):
                continue
            processes[victim].kill()
            ends(processes[victim], victim, code=-9)
            killed.append(time.time())
            processes[victim], began[victim] = begin(victim), time.time()
        (folder / "hurry").touch()
        for one, process in processes.items():
            ends(process, one, limit_s=600.0)
    finally:
        for process in processes.values():
            process.kill()
    alone, weights = one_device(folder / "alone", **more)
    check_groups(folders, folders, alone, weights, tolerance=1e-9)
    made = sorted(line["at"] for one in folders for line in lines_of(one / "seen_0.jsonl"))
    (folder / "killed.json").write_text(json.dumps(killed))
    return [_longest(made, *span) for span in zip(killed, [*killed[1:], made[-1]], strict=True)]


def _last_update(folder: Path) -> float:
    try:
        return (folder / "seen_0.jsonl").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _longest(made: list[float], start: float, stop: float) -> float:
    """The longest of the times between updates, each as far as it lies in the span."""
    return max(
        min(later, stop) - max(sooner, start) for sooner, later in pairwise(made) if later > start and sooner < stop
    )


def main() -> None:
    from torchft.coordination import LighthouseServer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    server = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=3_000)
    found = sorted(kill_at_random(given.folder, server.address(), given.groups, given.kills, given.seed))
    server.shutdown()
    sys.stdout.write(
        f"{len(found)} kills of {given.groups} groups: samples, losses and weights are those of one device; without an update for "
        f"{statistics.median(found):.1f} s (median), {found[-1]:.1f} s at most, above 10 s {sum(one > 10 for one in found)} times\n"
    )


if __name__ == "__main__":
    main()
