"""Kills groups at random moments of a training, and checks it: ``python torchft_kills.py --groups 3 --kills 50 --folder FOLDER``.

With ``--processes 2`` each group has two processes and FSDPStrategy, and sometimes one of them is killed, sometimes both. With
``--sync-every 10`` groups exchange weights after rounds of ten updates, by DiLoCo.
"""

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

import torch
from flextrain_torchft import lineage
from torchft_checks import (
    check_groups,
    ends,
    launched,
    lines_of,
    nesterov,
    one_device,
    simulated,
    start,
)
from torchft_group import BATCH

SAMPLES = 1000  # 84 updates of an epoch, a few seconds
EVERY_S = 6.0


def kill_at_random(
    folder: Path,
    lighthouse: str,
    groups: int,
    kills: int,
    seed: int,
    processes: int = 1,
    sync_every: int | None = None,
    pause: float = 0.05,
    samples: int = SAMPLES,
) -> list[float]:
    """Kill a group every few seconds, start it again at once, and compare the outcome with one device, or a simulation of rounds.

    A moment is any from the first update that a group waits for on, while it gets a checkpoint too. One other group has trained since its
    start, because it alone has the weights. Of a group of several processes all are killed or one, and the others up to two seconds later, as a
    launcher does.

    Returns:
        Of each kill, the longest time between it and the next one in which no group made an update, in seconds.
    """
    chance = random.Random(seed)
    # No group that begins anew finds a checkpoint of its own.
    more: dict[str, Any] = dict(
        samples=samples, train_cfg=dict(max_epochs=kills + 2), param_scheduler=[],
        default_hooks=dict(logger=dict(interval=50), checkpoint=dict(interval=kills + 2)),
    )  # fmt: skip
    how: dict[str, Any] = dict(exchange_timeout_s=10.0, events=dict(pause=pause))
    if processes > 1:
        how["inner"] = dict(type="FSDPStrategy", device="cpu", timeout_s=300)
    if sync_every is not None:  # the record does not say whose state of an optimizer a group has
        how["rounds"] = dict(sync_every=sync_every, outer_optimizer={})
        more["optim_wrapper"] = dict(
            optimizer=dict(type="SGD", lr=0.02), accumulative_counts=2, clip_grad=dict(max_norm=0.5)
        )
    folders = [folder / f"group_{number}" for number in range(groups)]

    def begin(one: Path) -> Any:
        (one / "arrived").unlink(missing_ok=True)
        places = launched(processes) if processes > 1 else [None]
        return [start(one, lighthouse, place, **how, more=more) for place in places]

    running = {one: begin(one) for one in folders}
    began = dict.fromkeys(folders, time.time())
    killed = list[float]()
    try:
        while len(killed) < kills:
            time.sleep(chance.uniform(0.5, 2 * EVERY_S - 0.5) if killed else 0.5)
            if any(process.exitcode is not None for of_group in running.values() for process in of_group):
                break  # at the end of the training, or by an error, which is told below
            arrived = [one for one in folders if (one / "arrived").exists()]
            trained = {one for one in arrived if _last_update(one) > began[one]}
            if (
                not arrived
                or not trained - {victim := chance.choice(arrived)}
                or (not killed and len(trained) < groups)
            ):
                continue
            first = chance.choice(running[victim])
            first.kill()
            ends(first, victim, code=-9)
            killed.append(time.time())
            time.sleep(chance.choice([0.0, chance.uniform(0.0, 2.0)]) if processes > 1 else 0.0)
            for process in running[victim]:
                process.kill()
                process.join()
            running[victim], began[victim] = begin(victim), time.time()
        while killed and not all(_last_update(one) > since for one, since in began.items()):  # until it is back
            if any(process.exitcode is not None for of_group in running.values() for process in of_group):
                break
            time.sleep(0.5)
        (folder / "hurry").touch()
        for one, of_group in running.items():
            for process in of_group:
                ends(process, one, limit_s=600.0)
    finally:
        for of_group in running.values():
            for process in of_group:
                process.kill()
    alone, weights = one_device(folder / "alone", batch_size=BATCH * processes, **more)
    if sync_every is None:
        check_groups(folders, folders, alone, weights, tolerance=1e-9, processes=processes)
    else:
        initial = torch.load(folders[0] / "initial.pt")
        weights, losses = simulated(
            initial, lineage(folders), alone, nesterov, lambda parameters: torch.optim.SGD(parameters, lr=0.02),
            processes, schedules=False, samples=samples,
        )  # fmt: skip
        check_groups(folders, folders, alone, weights, tolerance=1e-9, processes=processes, losses=losses)
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
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sync-every", type=int)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds before every update until the last kill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    given = parser.parse_args()
    server = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=3_000)
    how = (given.groups, given.kills, given.seed, given.processes, given.sync_every, given.pause, given.samples)
    found = sorted(kill_at_random(given.folder, server.address(), *how))
    server.shutdown()
    same = "one device" if given.sync_every is None else "a simulation of the record"
    sys.stdout.write(
        f"{len(found)} kills of {given.groups} groups: samples, losses and weights are those of {same}; without an update for "
        f"{statistics.median(found):.1f} s (median), {found[-1]:.1f} s at most, above 10 s {sum(one > 10 for one in found)} times\n"
    )


if __name__ == "__main__":
    main()
