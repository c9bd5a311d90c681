"""In a worker process: what a plan says of this rank, and what the same update needs in a real run."""

import os
from pathlib import Path

from flextrain import __version__
from flextrain.core.checkpoint import save_checkpoint
from flextrain.core.random_state import rng_state
from flextrain.testing.loop import environ
from flextrain.tools.planning.execution import arguments_for, measure, rehearse
from flextrain.tools.planning.plan import PlannedJob
from flextrain.tools.planning.update import Training, set_seed
from flextrain.tools.script import runner_arguments

SCRIPT = str(Path(__file__).with_name("zoo.py"))


def both(strategy, world_size, *arguments, changes=None):
    job = PlannedJob(SCRIPT, strategy, world_size, 1, arguments, changes or {})
    real = measure(job)
    own = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    with environ(**own):
        planned, _ = rehearse(job, int(own["RANK"]))
    return planned, real


def save(folder, strategy, world_size, *arguments):
    """Train and save a checkpoint, as a runner does."""
    job = PlannedJob(SCRIPT, strategy, world_size, 1, arguments)
    with runner_arguments(job.script, job.arguments) as given:
        set_seed()
        training = Training(arguments_for(job, given), job)
        training.run()
        trained, topology = training.strategy, training.strategy.topology
        save_checkpoint(
            folder,
            trained.state_dict(),
            per_rank={"rng": rng_state(trained.device)} if topology.reports else None,
            number=topology.data.index,
            written_by={"flextrain": __version__, "strategy": type(trained).__name__},
        )
        trained.teardown()


def sent(rank):
    """Calls, bytes and sent bytes, by collective and axis."""
    found = {}
    for traffic in rank.traffic:
        row = found.setdefault((traffic.collective, traffic.axis, traffic.ranks), [0, 0, 0, 0])
        for i, value in enumerate((traffic.count, traffic.payload, traffic.inside, traffic.between)):
            row[i] += value
    return found
