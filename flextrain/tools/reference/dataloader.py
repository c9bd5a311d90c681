"""The keys of a dataloader given as a dict: torch's, with what is different here."""

from __future__ import annotations

from .entry import Argument

_KEYS = (
    (
        "dataset",
        "dataset | dict",
        None,
        "the dataset: an object with a length and indices, a stream, or ``dict(type=...)``",
    ),
    ("batch_size", "int", "1", "samples of a batch, on each process that has data of its own"),
    ("shuffle", "bool", "True in training, else False", "a new order in every epoch; give it here or to ``sampler``"),
    ("sampler", "dict | sampler", 'dict(type="DefaultSampler")', "which process reads which samples, in which order"),
    ("batch_sampler", "dict | sampler | None", "None", "makes batches of what ``sampler`` gives"),
    (
        "collate_fn",
        "dict | str | function",
        '"pseudo_collate"',
        'makes a batch of samples: "pseudo_collate" makes lists of fields, "default_collate" stacks them to tensors',
    ),
    ("num_workers", "int", "0", "worker processes that load batches; 0: the training process loads them itself"),
    ("pin_memory", "bool", "False", "load into page-locked memory, from which copies to an accelerator are faster"),
    ("drop_last", "bool", "False", "leave out the last batch of an epoch if it is smaller than the others"),
    ("timeout", "float", "0", "seconds to wait for a batch of the workers; 0: without limit"),
    ("worker_init_fn", "dict | str | function | None", "None", "called in each worker with the worker's number"),
    ("multiprocessing_context", "str | None", "None", 'how workers are started: "fork", "spawn" or "forkserver"'),
    ("prefetch_factor", "int | None", "None", "batches that each worker loads ahead; None: 2"),
    ("persistent_workers", "bool", "False", "keep the workers between epochs"),
    ("pin_memory_device", "str", '""', "the device to pin memory for; empty: the accelerator in use"),
    ("in_order", "bool", "True", "give the batches of several workers in the order of the sampler"),
    (
        "num_batch_per_epoch",
        "int | None",
        "None",
        "epochs of only so many batches per process, of the first samples, to try a configuration out; None: all",
    ),
)

DATALOADER_KEYS = tuple(Argument(*key) for key in _KEYS)
"""Every key that ``train_dataloader=dict(...)`` takes."""
