"""Predictions for every sample of a data set, on the host: what FlexibleRunner.predict returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ..core.base.config import check_call
from ..core.base.errors import ConfigError
from ..core.base.overriding import overridden
from ..core.comm.agreement import gather_differing, raising_together
from ..core.comm.collectives import broadcast_object, is_main
from ..core.device.device import to_device
from ..core.hugging_face.transformers_private import is_model_class
from ..core.model.base_model import class_name
from ..core.random.generators import kept_random_state
from ..core.torch_compat.torch_private import without_compiling
from ..strategies.base import Strategy
from ..strategies.parts import full_weights
from ..strategies.parts.whole_weights import buffers_kept
from .data.checks import loader_and_shard
from .data.samplers import DefaultSampler, DividedSampler, ShardedSampler, chain_of
from .data.streams.divided_streams import DividedStream
from .data.user_loaders import TORCHS_SAMPLERS, deals_batches, length_of, sampler_of
from .loops.evaluate import TestLoop
from .metrics.base import BaseMetric

if TYPE_CHECKING:
    from .run import Run

_logger = logging.getLogger("flextrain")


class Predictions(BaseMetric):
    """Keeps what the model returns, sample by sample; the gathered ones are in ``found`` on rank 0.

    Args:
        samples: how many there are, if that is known.
    """

    def __init__(self, samples: int | None = None) -> None:
        super().__init__()
        self.found: list[Any] = []
        self._samples = samples
        self._said: set[str] = set()

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Append a prediction for each sample of the batch."""
        outputs = to_device(data_samples, torch.device("cpu"))
        count = _count(outputs)
        if count is None:
            raise ConfigError(
                f"predict: the model returned {type(outputs).__name__}, return a tensor or list with an entry for each sample, or a "
                "dict of them"
            )
        if isinstance(outputs, tuple) and not _has_rows(outputs, count):
            raise ConfigError(
                f"predict: the model returned a tuple, of which a part has no entry for each of the {count} samples; return a dict, of "
                "which such parts are left out"
            )
        left_out = [*_without_rows(outputs, count)] if isinstance(outputs, Mapping) else []
        if unsaid := [name for name in left_out if name not in self._said]:
            self._said.update(unsaid)
            _logger.info(f"predict: {', '.join(unsaid)} have no entry for each sample, and are left out")
        if isinstance(outputs, Mapping):
            outputs = {name: value for name, value in outputs.items() if name not in left_out}
        self.results += [_sample(outputs, index) for index in range(count)]

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Keep the predictions, and return no metrics."""
        if self._samples not in (None, len(results)):
            raise ConfigError(
                f"predict: the model returned {len(results)} predictions for {self._samples} samples; the first dimension of a tensor, "
                "and the length of a list, has to be that of the batch"
            )
        self.found = results
        return {}


def prediction_loop(run: Run, dataloader: Any, loader: Any, options: Mapping[str, Any]) -> TestLoop:
    """Return the loop whose ``run`` makes the predictions.

    Args:
        run: the run.
        dataloader: what the user has given.
        loader: what was built of it.
        options: of the loop.

    Raises:
        ConfigError: the predictions are not known to come in the data set's order.
    """
    if why := _unordered(loader, run.strategy.topology.data.count, loader_and_shard(dataloader)[1]):
        shuffled = isinstance(dataloader, Mapping) and dataloader.get("shuffle") and "sampler" in why
        key = "shuffle" if shuffled else why.partition(":")[0]
        raise ConfigError(
            f"predict.dataloader.{key}: predictions would come in another order than the data set's,{why.partition(':')[2]}"
        )
    check_call(TestLoop, options, "predict", ("runner", "dataloader", "evaluator"))
    sampler = sampler_of(loader)
    samples = sampler.num_samples if isinstance(sampler, DefaultSampler) and not deals_batches(loader) else None
    return TestLoop(run, loader, Predictions(samples), **options)


def _unordered(loader: Any, count: int, asked: bool | None) -> str | None:
    """Return "key: why" if predictions of ``count`` processes are not known to come in the data set's order."""
    if asked is False and count > 1:
        return "shard: False gives every process data of its own; leave it out, and give all processes the same data"
    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers > 1:
            return f"num_workers: {loader.num_workers} workers read a stream in turns; give 0 or 1"
        if count > 1 and not isinstance(loader.dataset, DividedStream):
            return "dataset: every process reads shards of its own; give a data set with a length"
        return None
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        return "in_order: False lets workers overtake each other; leave it out"
    chosen = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    key = "sampler" if chosen is loader.sampler or type(chosen).__module__ in TORCHS_SAMPLERS else "batch_sampler"
    for part in chain_of(chosen):
        if not _keeps_order(part):
            return f"{key}: {type(part).__name__} is not known to keep it; leave it out, or give a list of indices as sampler"
    return None


def _keeps_order(sampler: Any) -> bool:
    if isinstance(sampler, ShardedSampler):
        own = overridden(sampler, "__iter__", "order")
        return isinstance(sampler, DefaultSampler) and not sampler.shuffle and not own
    if type(sampler) is DistributedSampler:
        return not sampler.shuffle and sampler.total_size == length_of(sampler.dataset)
    name = type(sampler).__name__ if type(sampler).__module__ in TORCHS_SAMPLERS else ""
    return name in ("SequentialSampler", "BatchSampler") or isinstance(sampler, (Sequence, DividedSampler))


def predictions_of(loop: TestLoop, everywhere: bool) -> list[Any] | None:
    """Run the loop, and return the predictions of all processes: on each of them, or on rank 0 alone; a collective."""
    loop.run()
    (predictions,) = loop.evaluator.metrics
    assert isinstance(predictions, Predictions)
    found = predictions.found
    if everywhere:
        return broadcast_object(found)
    return found if is_main() else None


def _count(outputs: Any) -> int | None:
    """Return the number of samples that outputs are of; None if they do not tell."""
    if isinstance(outputs, Tensor):
        return len(outputs) if outputs.dim() else None
    if isinstance(outputs, list):
        return len(outputs)
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple) else ()
    return next((count for part in parts if (count := _count(part)) is not None), None)


def _has_rows(value: Any, count: int) -> bool:
    if isinstance(value, (Tensor, list)):
        return _count(value) == count
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return len(parts) > 0 and all(_has_rows(part, count) for part in parts)


def _without_rows(outputs: Mapping[str, Any], count: int) -> Iterator[str]:
    return (name for name, value in outputs.items() if not _has_rows(value, count))


def _sample(outputs: Any, index: int) -> Any:
    if isinstance(outputs, Tensor):
        return outputs[index].clone()  # a view would be sent with all that it is a view of
    if isinstance(outputs, Mapping):
        return {name: _sample(value, index) for name, value in outputs.items()}
    return tuple(_sample(part, index) for part in outputs) if isinstance(outputs, tuple) else outputs[index]


# Generating text: a model's own ``generate`` with whole weights, inside of a run that goes on as if nothing had been
# generated.


# Names of tensors without which a model of transformers has nothing to generate from.
_INPUTS = frozenset({"input_ids", "inputs_embeds", "input_features", "pixel_values", "decoder_input_ids"})


def check_generates(model: nn.Module) -> None:
    """Raise ConfigError if a model has no ``generate``; it names a part of the model that has one."""
    if callable(getattr(model, "generate", None)):
        return
    parts = [name for name, part in model.named_modules() if name and callable(getattr(part, "generate", None))]
    hint = "define it, or give a model that has one, such as AutoModelForCausalLM of transformers"
    if parts:
        hint = f"its {parts[0]} has one: def generate(self, *args, **kwargs): return self.{parts[0]}.generate(*args, **kwargs)"
    raise ConfigError(f"generate: {class_name(model)} has no method generate; {hint}")


def _check_inputs(model: nn.Module, inputs: Any, seed: Any, by_layer: Any) -> None:
    """Raise ConfigError for what transformers would end on in an error of its own; other models take what they like."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"generate.seed: {seed!r} is not allowed, give an integer")
    if not isinstance(by_layer, bool):
        raise ConfigError(f"generate.by_layer: {by_layer!r} is not allowed, give True or False")
    if inputs is None or not is_model_class(type(model)):
        return
    for key, value in inputs.items() if isinstance(inputs, Mapping) else [("", inputs)]:
        where = f'generate.inputs["{key}"]' if key else "generate.inputs"
        if not isinstance(value, Tensor) and (not key or key in _INPUTS or isinstance(value, (str, list))):
            raise ConfigError(
                f'{where}: is {type(value).__name__}, give tensors, as tokenizer(texts, return_tensors="pt", padding=True) does'
            )
        if not isinstance(value, Tensor) or (key or getattr(model, "main_input_name", "")) != "input_ids":
            continue
        if value.dim() != 2 or not value.numel():
            raise ConfigError(f"{where}: has shape {list(value.shape)}, give (texts, tokens), at least one of each")
        if value.is_floating_point():
            raise ConfigError(f"{where}: is {str(value.dtype).removeprefix('torch.')}, give token numbers (.long())")


def generate(
    strategy: Strategy,
    inputs: Any,
    options: Mapping[str, Any],
    *,
    seed: int | None,
    memory_limit: int | str | None,
    by_layer: bool,
) -> Any:
    """Return what the model generates for this process's inputs, see ``FlexibleRunner.generate``; a collective.

    Args:
        strategy: it has the model.
        inputs: tensors, in a mapping by name or alone; None on a process without any.
        options: further arguments of the model's ``generate``.
    """
    check_generates(strategy.module)
    given = gather_differing((inputs is not None, _problem(inputs, options)))
    asking = [rank for rank, (asks, _) in enumerate(given) if asks]
    if wrong := next((problem for _, problem in given if problem), None):
        raise ConfigError(wrong)
    if not asking:
        raise ConfigError("generate.inputs: is None on every process, give inputs on one or more")
    with raising_together():
        _check_inputs(strategy.module, inputs, seed, by_layer)
    device = strategy.device
    with (
        full_weights(strategy, ranks=asking, memory_limit=memory_limit, by_layer=by_layer) as model,
        kept_random_state(device),
        without_compiling(),
        torch.no_grad(),
    ):
        if model is None:
            return None
        model.eval()
        data = to_device(inputs, device)
        if seed is not None:
            torch.manual_seed(seed)
        is_live = model is strategy.module
        with buffers_kept(model) if is_live else nullcontext(), strategy.autocast():
            if isinstance(data, Mapping):
                return model.generate(**data, **options)
            return model.generate(data, **options)


def _problem(inputs: Any, options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments of this process."""
    misplaced = [key for key in options if key in _INPUTS] if inputs is None else []
    if misplaced:
        return (
            f"generate.inputs: is None, and {misplaced[0]} is an argument of its own; give it in a dict: "
            f"generate(dict({misplaced[0]}=..., attention_mask=...), max_new_tokens=20)"
        )
    both = sorted(map(str, inputs.keys() & options.keys())) if isinstance(inputs, Mapping) else []
    if both:
        return f"generate.{both[0]}: is given twice, in inputs and as an argument; leave one of them out"
    return None
