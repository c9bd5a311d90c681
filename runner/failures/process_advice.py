"""Advice on errors of data workers, metrics, hooks, compilers and other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.collate import PADDING
from .advice import Failure, rule

# Worker processes


@rule(
    r"(?:stack expects each tensor to be equal size|each element in list of batch should be of equal size|"
    r"all input arrays must have the same shape)"
)
def _unequal(failure: Failure) -> str:
    return (
        "samples of one batch have different shapes: pad or resize them in the dataset, or in a function given as "
        f"{failure.origin.loader}.collate_fn; {PADDING}"
    )


@rule(r"default_collate: batch must contain tensors.*found <class '([^']+)'>")
def _collate(failure: Failure) -> str:
    return (
        f"a sample holds {failure.found[0]}, which default_collate cannot stack: turn it into a tensor or a number, or leave "
        f"out {failure.origin.loader}.collate_fn, which then gathers lists"
    )


_PICKLING = (
    "what worker processes are given must be importable: no lambda, no function or class inside a function, no open file; "
    'else num_workers=0, or env_cfg=dict(mp_cfg=dict(mp_start_method="fork"))'
)
rule(r"Can't (?:pickle|get) (?:local )?(?:object|attribute|<)|cannot pickle|PicklingError|Can't pickle")(_PICKLING)
rule(r"before the current process has finished its\s+bootstrapping")(
    'new processes import the script: protect its last lines by `if __name__ == "__main__":`'
)
rule(r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (?:exited unexpectedly|is killed)")(
    "the system ended a worker, mostly for memory: fewer num_workers, a smaller prefetch_factor, more /dev/shm"
)
rule(r"DataLoader timed out after")(
    "one batch took longer than the dataloader's timeout: a larger one, or more num_workers"
)
rule(r"unable to (?:open|mmap|write to file|allocate) ?(?:shared memory|</torch)|No space left on device")(
    "the shared memory or the disk is full: fewer num_workers, or a larger /dev/shm (docker run --shm-size)"
)
rule(r"received 0 items of ancdata|Too many open files")(
    "too many files are open: env_cfg=dict(resource_limit=65536), or "
    'torch.multiprocessing.set_sharing_strategy("file_system")'
)
rule(r"Cannot re-initialize (?:CUDA|XPU|NPU) in forked subprocess")(
    "the dataset uses the accelerator in a worker: keep samples on the CPU, batches are moved by the runner; else "
    'env_cfg=dict(mp_cfg=dict(mp_start_method="spawn"))'
)
rule(r"object of type 'NoneType' has no len|'NoneType' object is not (?:subscriptable|iterable|callable)")(
    lambda failure: (
        "something returned None, for example a function that lacks its return" if failure.origin.part else None
    )
)

# Hooks


@rule(r"^TypeError: .*(?:before|after)_\w+\(\) (?:got an unexpected|takes|missing)")
def _hook(failure: Failure) -> str:
    return (
        "hook points take (self, runner, batch_idx, data_batch=None) before an iteration, with outputs=None after it, and "
        "(self, runner) otherwise; after_val_epoch takes metrics=None too"
    )


# Several processes

ANOTHER_ENDED = (
    "another process ended, or its connection broke: its own line in the log, which begins with its rank, says why"
)
LOST = r"Connection (?:closed by peer|reset by peer|refused)|Broken pipe|recvValue failed|remote process exited"
"""Pattern of errors that follow from the end of another process."""
rule(LOST)(ANOTHER_ENDED)
rule(r"[Tt]imed out (?:waiting|after)|[Ww]ait timeout|Watchdog caught collective|Socket Timeout|DistStoreError")(
    "another process did not come to the same call in time: it failed, hangs, or has more work there; "
    "env_cfg=dict(dist_cfg=dict(timeout=...)) sets the seconds"
)
rule(r"Duplicate GPU detected")("two processes use one GPU: start no more processes than there are GPUs")
rule(r"invalid device ordinal")("there are fewer devices than processes on this machine: start fewer processes")
rule(r"NCCL error|unhandled (?:system|cuda) error")(
    "NCCL_DEBUG=INFO names the reason, mostly a network interface or a driver"
)

# What a metric was given, if nothing else is known of its error


@rule("")
def _metric(failure: Failure) -> str | None:
    if failure.origin.kind != "metric" or not failure.origin.part.endswith(".process)"):
        return None
    if failure.kind not in ("KeyError", "TypeError", "AttributeError", "IndexError", "ValueError", "RuntimeError"):
        return None
    outputs = failure.origin.local("process", "data_samples")
    return f"data_samples is what the model gave in evaluation, here {_described(outputs)}"


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, list(value)[:8]))}"
    if isinstance(value, (list, tuple)):
        kinds = ", ".join(dict.fromkeys(type(item).__name__ for item in value[:8]))
        return f"a {type(value).__name__} of {len(value)} ({kinds})"
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}{f' of shape {tuple(shape)}' if shape is not None else ''}"
