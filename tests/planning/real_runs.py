"""In a worker process: what a plan says of this rank, and what the same update needs in a real run."""

import contextlib
import functools
import gc
import os
import time
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.utils.flop_counter import FlopCounterMode

from flextrain import __version__
from flextrain.core.checkpoint import save_checkpoint
from flextrain.core.random.generators import rng_state
from flextrain.plan import ledger, update
from flextrain.plan.child import answer, arguments_for, measure, rehearse
from flextrain.plan.ledger import Ledger, Network
from flextrain.plan.plan import PlannedJob
from flextrain.plan.rehearsing import rehearsal
from flextrain.plan.update import Training, set_seed
from flextrain.strategies import offloading
from flextrain.testing.loop import environ
from flextrain.user_script import runner_arguments

from .allocator import counting

SCRIPT = str(Path(__file__).with_name("zoo.py"))
OWN = ("RANK", "LOCAL_RANK", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


_LETTING_GO_S = 0.003


def measured(job):
    """What an update needs in a real run, which waits after each collective.

    A thread of gloo wakes who waits for a collective, and lets go of its tensors a moment later. Otherwise they may be freed
    after the next operation has allocated its own: peaks of FSDP then differ by 10 % from run to run.
    """
    with contextlib.ExitStack() as stack:
        for owner, name in ((dist.Work, "wait"), (_functional_collectives, "wait_tensor")):
            stack.enter_context(mock.patch.object(owner, name, _pausing(getattr(owner, name))))
        return measure(job)


def _pausing(wait):
    @functools.wraps(wait)
    def wait_and_pause(*args, **kwargs):
        found = wait(*args, **kwargs)
        time.sleep(_LETTING_GO_S)
        return found

    return wait_and_pause


def job_of(strategy, world_size, arguments, changes):
    return PlannedJob(SCRIPT, strategy, world_size, 1, arguments, changes or {})


def both(strategy, world_size, *arguments, changes=None):
    """The plan of this rank, and the same books kept on a real run."""
    job = job_of(strategy, world_size, arguments, changes)
    real = measured(job)
    own = {name: os.environ[name] for name in OWN}
    with environ(**own):
        plan, _ = rehearse(job, int(own["RANK"]))
    return plan, real


def planned(strategy, world_size, *arguments, changes=None, rank=0):
    """The answer of a process that plans a rank of many."""
    with environ(**dict.fromkeys(OWN, "0")):
        return answer(job_of(strategy, world_size, arguments, changes), rank)


def planned_whole(*arguments, **options):
    """The same with all micro-batches executed."""
    with mock.patch.object(update, "REPEATED", 10**9):
        return planned(*arguments, **options)


def refusal_of_script(script, *arguments):
    """Why a script is not planned."""
    with environ(**dict.fromkeys(OWN, "0")):
        return answer(PlannedJob(script, "ddp", 2, 1, arguments), 0).problem


def refusal(*arguments, **options):
    """Why a configuration is not planned."""
    found = planned(*arguments, **options)
    assert (found.plan is None) == bool(found.problem)
    return found.problem


def allocated(strategy, world_size, *arguments, changes=None):
    """The largest number of bytes that torch's allocator has given out during the updates of a real run, which nothing watches."""
    with mock.patch.object(update, "Ledger", Unwatched):
        return peak_of(job_of(strategy, world_size, arguments, changes))


def peak_of(job):
    """The largest number of bytes that torch's allocator has given out during a job's updates."""
    counted = counting()
    gc.collect()
    before = counted.bytes_live()
    measured(job)
    return counted.bytes_peak() - before


def compared(strategy, world_size, *arguments, changes=None):
    """The plan of this rank, the books of a real run, and the allocator's peak in another real run."""
    peak = allocated(strategy, world_size, *arguments, changes=changes)
    return *both(strategy, world_size, *arguments, changes=changes), peak


class OnHost:
    """In place of ``offloading.on_host``: memory that torch's allocator does not give out, counted apart."""

    def __init__(self):
        self.now = self.most = 0

    def __call__(self, like, pinned):
        memory = np.empty(like.nbytes, dtype=np.uint8)
        self.now += memory.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(memory, self._gone, memory.nbytes).atexit = False
        return torch.from_numpy(memory).view(like.dtype).reshape(like.shape)

    def _gone(self, size):
        self.now -= size


def kept(strategy, world_size, *arguments, changes=None):
    """The plan of this rank, and the books of a real run; bytes of activations when backward begins, as planned and as the allocator has
    them in another real run, which nothing watches; the allocator's peak there, and the most bytes on the host."""
    before, saved, host = [], [], OnHost()

    def note(gradient):
        saved.append(counting().bytes_live() - before.pop())

    class Saving(Unwatched):
        def watch(self, module, optimizers=()):
            if optimizers:
                module.register_forward_pre_hook(lambda *_: before.append(counting().bytes_live()))
                module.register_forward_hook(lambda own, args, output: output["loss"].register_hook(note) and None)

    with mock.patch.object(update, "Ledger", Saving), mock.patch.object(offloading, "on_host", host):
        peak = peak_of(job_of(strategy, world_size, arguments, changes))
    with mock.patch.object(ledger, "MOMENTS", 10**6):
        plan, real = both(strategy, world_size, *arguments, changes=changes)
    last = [moment.by_kind for moment in plan.moments if moment.phase == "forward"][-1]
    return plan, real, (last["activations"], saved[-1]), peak, host.most


def waiting():
    """Bytes before and after waiting for a collective in a rehearsal, and whether both have the same tensor."""
    with environ(**dict.fromkeys(OWN, "0")), rehearsal(0, 8) as found, Ledger(0, Network(8)) as ledger:
        ledger.begin()
        with found.without_values():
            sent = torch.empty(100)
            before = ledger.memory.total
            received = torch.ops._c10d_functional.wait_tensor(sent)
        return before, ledger.memory.total, received is sent


def counted_by_torch(strategy, world_size, *arguments, changes=None):
    """Floating-point operations of an update by torch's own counter, and those of a plan."""
    job = job_of(strategy, world_size, arguments, changes)
    with mock.patch.object(update, "Ledger", Unwatched), FlopCounterMode(display=False) as counter:
        measure(job)
    own = {name: os.environ[name] for name in OWN}
    with environ(**own):
        plan, _ = rehearse(job, int(own["RANK"]))
    return counter.get_total_flops() / update.REAL_UPDATES, plan.flops


class Unwatched(Ledger):
    """Sees no operation; the allocator's peak is that since the first update."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def watch(self, module, optimizers=()):
        pass

    def begin(self):
        if self._setting_up:
            counting().forget_peak()
        super().begin()


def save(folder, strategy, world_size, *arguments):
    """Train and save a checkpoint, as a runner does."""
    job = PlannedJob(SCRIPT, strategy, world_size, 1, arguments)
    with runner_arguments(job.script, job.arguments) as given:
        set_seed()
        training = Training(arguments_for(job, given)[0], job)
        training.run()
        trained, topology = training.strategy, training.strategy.topology
        save_checkpoint(
            folder,
            trained.state(),
            per_rank={"rng": rng_state(trained.device)} if topology.reports else None,
            number=topology.data.index,
            written_by={"flextrain": __version__, "strategy": type(trained).__name__},
        )
        trained.leave()


def sent(rank):
    """Calls, bytes and sent bytes, by collective and axis."""
    found = {}
    for traffic in rank.traffic:
        row = found.setdefault((traffic.collective, traffic.axis, traffic.ranks), [0, 0, 0, 0])
        for i, value in enumerate((traffic.count, traffic.payload, traffic.inside, traffic.between)):
            row[i] += value
    return found
