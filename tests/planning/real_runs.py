"""In a worker process: what a plan says of this rank, and what the same update needs in a real run."""

import os
from pathlib import Path

from flextrain.testing.loop import environ
from flextrain.tools.planning.execution import measure, rehearse
from flextrain.tools.planning.plan import PlannedJob

SCRIPT = str(Path(__file__).with_name("zoo.py"))


def both(strategy, world_size, *arguments, changes=None):
    job = PlannedJob(SCRIPT, strategy, world_size, 1, arguments, changes or {})
    real = measure(job)
    own = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    with environ(**own):
        planned, _ = rehearse(job, int(own["RANK"]))
    return planned, real


def sent(rank):
    """Calls, bytes and sent bytes, by collective and axis."""
    found = {}
    for traffic in rank.traffic:
        row = found.setdefault((traffic.collective, traffic.axis, traffic.ranks), [0, 0, 0, 0])
        for i, value in enumerate((traffic.count, traffic.payload, traffic.inside, traffic.between)):
            row[i] += value
    return found
