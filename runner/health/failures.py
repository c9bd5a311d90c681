"""The reason of a failure in words: the part of the run, its own message, and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from ...core.base.errors import FlexTrainError
from ...core.torch_compat.torch_private import is_compile_error
from ...core.version import is_from_private_use, untried
from ...strategies.parts import explain
from ..data.collate import PADDING
from .origin import Origin, causes, find_origin

if TYPE_CHECKING:
    from ..run import Run

# Advice on errors of torch that users meet: what they mean here, and which configuration key helps.


@dataclass(frozen=True)
class Failure:
    """An error with what is known of it.

    Attributes:
        run: the run that it ended.
        error: the error.
        origin: where it came from.
        kind: name of its class; for an error of a data worker, of the original one.
        text: its whole message; for an error of a data worker, the original one.
        found: groups of the pattern that its message matches.
    """

    run: Run
    error: BaseException
    origin: Origin
    kind: str
    text: str
    found: tuple[Any, ...] = ()


Advice = str | Callable[[Failure], str | None]

RULES: list[tuple[re.Pattern[str], Advice]] = []
"""Patterns of ``ErrorClass: message``, each with what to do; the first that matches and has an advice counts."""


def rule(pattern: str) -> Callable[[Advice], Advice]:
    """Register an advice, or a function that gives one, for messages that contain ``pattern``."""

    def add(advice: Advice) -> Advice:
        RULES.append((re.compile(pattern, re.DOTALL), advice))
        return advice

    return add


def advice_on(failure: Failure) -> str | None:
    """Return what to do about an error; None if there is nothing to add to its own message."""
    said = f"{failure.kind}: {failure.text}"
    for pattern, advice in RULES:
        if (match := pattern.search(said)) is None:
            continue
        if isinstance(advice, str):
            return advice
        known = Failure(failure.run, failure.error, failure.origin, failure.kind, failure.text, match.groups())
        if text := advice(known):
            return text
    return None


@rule(r"^(?:AttributeError|ImportError|ModuleNotFoundError|TypeError|KeyError|AssertionError): ")
def _private(failure: Failure) -> str | None:
    newer = "; ".join(untried())
    return f"{newer}: install one of these" if newer and is_from_private_use(failure.error) else None


# Advice on errors of forward, backward and the optimizer.


# Arguments of forward


@rule(
    r"^TypeError: \S+\(\) (?:got an unexpected keyword|missing \d+ required|takes .*positional argument|got multiple)"
)
def _arguments(failure: Failure) -> str | None:
    data = failure.origin.local("run_forward", "data")
    model = failure.run.strategy.module
    if failure.origin.kind != "forward" or data is None or "forward()" not in failure.text:
        return None
    names = list(inspect.signature(model.forward).parameters)
    takes = f"{type(model).__name__}.forward takes {', '.join(names)}"
    if isinstance(data, Mapping):
        return f"a batch that is a dict becomes keyword arguments, this one has {', '.join(map(str, data))}; {takes}"
    if isinstance(data, (list, tuple)):
        return f"a batch that is a list becomes positional arguments, this one has {len(data)}; {takes}"
    return f"this batch becomes one argument; {takes}"


def _lists(failure: Failure) -> str | None:
    data = failure.origin.local("run_forward", "data")
    fields = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    if failure.origin.kind != "forward" or (data is not None and not any(isinstance(value, list) for value in fields)):
        return None
    loader = getattr(failure.run, failure.origin.loader, None)
    if getattr(loader, "collate_fn", None) is default_collate:
        return (
            "each sample holds lists of numbers, which default_collate takes apart; give tensors in the dataset: "
            'dataset.with_format("torch") of Hugging Face, or torch.tensor(...)'
        )
    return (
        "the batch holds lists of samples, because a dataloader that is a dict does not stack them; "
        f'{failure.origin.loader}=dict(collate_fn="default_collate") makes tensors'
    )


rule(r"^TypeError: .*must be Tensor, not (?:list|tuple)")(_lists)
rule(r"^TypeError: .*argument '?(?:input|weight|target)'?.* not (?:list|tuple)")(_lists)
rule(r"^AttributeError: '(?:list|tuple)' object has no attribute")(_lists)
rule(r"^TypeError: (?:unsupported operand|can't multiply sequence|can only concatenate list|list indices)")(_lists)


# Shapes


@rule(r"mat1 and mat2 shapes cannot be multiplied|size mismatch, got input")
def _linear(failure: Failure) -> str:
    module = failure.origin.module
    if module is None or not isinstance(module[1], nn.Linear):
        return "the inner dimensions of a matrix product differ: compare the shapes of its two factors"
    given = failure.origin.local("forward", "input")
    shape = f" of shape {tuple(given.shape)}" if isinstance(given, Tensor) else ""
    return f"model.{module[0]} has in_features={module[1].in_features}, which must be the last dimension of its input{shape}"


@rule(r"Expected more than 1 value per channel when training")
def _one_sample(failure: Failure) -> str:
    return (
        "batch normalisation needs two values per channel, and the last batch is smaller; "
        f"{failure.origin.loader}=dict(drop_last=True), or another batch_size"
    )


rule(r"weight of size \[.*\], expected input\[.*\] to have \d+ channels")(
    "the channels of the input are its second dimension, (batch, channels, height, width); permute it in the dataset"
)


@rule(r"The size of tensor a \(\d+\) must match the size of tensor b|CheckpointError")
def _cache(failure: Failure) -> str | None:
    strategy = failure.run.strategy
    caches = bool(getattr(getattr(strategy.module, "config", None), "use_cache", False))
    if not caches or strategy.config.activation_checkpointing is None:
        return None
    return (
        "model.config.use_cache=True: layers that activation_checkpointing computes again in backward add to the cache of "
        "keys and values a second time; set use_cache=False in the model's config"
    )


rule(r"The size of tensor a \(\d+\) must match the size of tensor b")(
    "two tensors of different shapes are combined: compare their shapes, from the last dimension on"
)
rule(r"Expected input batch_size \(\d+\) to match target batch_size")(
    "logits and labels have different first dimensions: reshape both to (items, classes) and (items,)"
)
rule(r"Using a target size .* that is different to the input size|Target size .* must be the same as input size")(
    "this loss compares each output with one label, so both need one shape: labels.view_as(output)"
)
rule(r"shape '\[.*\]' is invalid for input of size")(
    "view or reshape is given a shape with another number of elements; batch dimensions are best left to -1"
)
rule(r"Calculated padded input size per channel.*Kernel size can't be greater")(
    "the input is smaller than the kernel: larger images, or fewer strides and poolings before this layer"
)

# Labels and indices


@rule(r"Target (-?\d+) is out of bounds")
def _label(failure: Failure) -> str:
    logits = failure.origin.local("cross_entropy", "input")
    logits = failure.origin.local("nll_loss", "input") if logits is None else logits
    classes = logits.shape[1] if isinstance(logits, Tensor) and logits.dim() > 1 else None
    known = f"the model has {classes} outputs, so labels go" if classes else "labels go"
    to = f"to {classes - 1}" if classes else "to the number of outputs less one"
    return f"{known} from 0 {to}, and one in {failure.origin.loader} is {failure.found[0]}; ignore_index leaves one out"


@rule(r"IndexError: index out of range in self")
def _embedding(failure: Failure) -> str:
    module = failure.origin.module
    if module is None or not isinstance(module[1], nn.Embedding):
        return "an index is larger than the table it is looked up in"
    given = failure.origin.local("forward", "input")
    wrong = ""
    if isinstance(given, Tensor) and given.numel():
        least = int(given.min())
        wrong = f", and gets {least if least < 0 else int(given.max())}"
    return (
        f"model.{module[0]} has num_embeddings={module[1].num_embeddings}, so indices go to "
        f"{module[1].num_embeddings - 1}{wrong}"
    )


rule(r"Expected tensor for argument #1 'indices' to have one of the following scalar types")(
    "an embedding looks up integers: convert them in the dataset (.long())"
)


rule(r"device-side assert triggered")(
    "mostly a label or an index out of range; the same run on the CPU names it, or CUDA_LAUNCH_BLOCKING=1 the line"
)

rule(r"0D or 1D target tensor expected|multi-target not supported")(
    "labels of cross_entropy are one integer for each sample, without a last dimension of 1: squeeze(-1) removes it"
)

# Precision and devices


@rule(
    r"must have the same dtype|expected scalar type|Found dtype \w+ but expected|not implemented for '|"
    r"should be the same|expected target dtype|expected m1 and m2 to have the same dtype|must be same dtype|Expected floating point type"
)
def _dtype(failure: Failure) -> str:
    if "cuda" in failure.text.lower() and "torch.FloatTensor" in failure.text:
        return _DEVICES
    if "'Long'" in failure.text or "Long" in failure.text or "'Int'" in failure.text:
        return "labels of classes are integers (.long()), inputs are floating point (.float()): convert them in the dataset"
    return (
        "tensors of different dtypes meet, NumPy's default is float64 (Double): convert in the dataset (.float()); "
        'optim_wrapper=dict(type="AmpOptimWrapper") casts during forward'
    )


_DEVICES = (
    "a tensor is not on the model's device: batches are moved, a tensor that forward makes or that is a mere attribute "
    "is not; use device=x.device, or register_buffer"
)
rule(
    r"Expected all tensors to be on the same device|is not on the expected device|is on cpu, but expected|Tensor for argument .* is on "
)(_DEVICES)
rule(r"Torch not compiled with CUDA enabled|Found no NVIDIA driver")(
    "the code asks for CUDA, which is not here: leave out .cuda() and device='cuda', models and batches are moved"
)
rule(r"Attempting to unscale FP16 gradients")(
    "AmpOptimWrapper needs float32 parameters: leave out .half() and torch_dtype=float16"
)
rule(r"No inf checks were recorded for this optimizer")(
    "no parameter of the optimizer has a gradient: the loss does not depend on them, or they are frozen"
)

# Losses and gradients


@rule(r"element \d+ of tensors does not require grad")
def _no_graph(failure: Failure) -> str:
    parameters = [*failure.run.strategy.module.parameters()]
    free = sum(parameter.requires_grad for parameter in parameters)
    return (
        f"the loss depends on no trainable parameter ({free} of {len(parameters)} are trainable): it was computed under "
        "no_grad, or from .detach(), .item() or .data"
    )


@rule(r"grad can be implicitly created only for (?:scalar|real scalar)")
def _not_scalar(failure: Failure) -> str:
    loss = failure.origin.local("backward", "loss")
    shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
    return f'the loss{shape} is no single number: take its mean(), or a loss with reduction="mean"'


rule(
    r"modified by an inplace operation|a leaf Variable that requires grad is being used in an in-place|"
    r"a view of a leaf Variable"
)(
    "backward needs a tensor as it was in forward: replace x += y and relu_(x) by x = x + y and relu(x), and update no "
    "parameter between forward and backward; torch.autograd.set_detect_anomaly(True) names the operation"
)
rule(r"Trying to backward through the graph a second time")(
    "a tensor of an earlier batch is part of this loss (a hidden state, a running mean): .detach() it, or call backward once"
)
rule(r"all elements of (?:input|target) should be between 0 and 1")(
    "BCELoss takes probabilities: BCEWithLogitsLoss takes the model's outputs as they are"
)
rule(r"One of the differentiated Tensors (?:appears to not have been used|does not require grad)")(
    "torch.autograd.grad is asked for a tensor that the loss does not depend on; allow_unused=True gives None"
)
rule(r'NotImplementedError: Module \[(\w+)\] is missing the required "forward"')(
    "define forward in this class; its name may be misspelled, or indented wrongly"
)

# Memory


def _memory(failure: Failure) -> str:
    if failure.origin.mode != "train":
        return f"a smaller {failure.origin.loader}.batch_size; outputs that a metric keeps belong on the CPU"
    accumulate = failure.run.accumulate
    return (
        f"a smaller train_dataloader.batch_size with a larger optim_wrapper.accumulative_counts (now {accumulate}) trains "
        'the same; AmpOptimWrapper, strategy=dict(type="fsdp") and strategy.activation_checkpointing take less too'
    )


rule(r"OutOfMemoryError|out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED")(_memory)


# Advice on errors of data workers, metrics, hooks, compilers and other processes.


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


@rule(r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (?:exited unexpectedly|is killed)")
def _ended_worker(failure: Failure) -> str:
    if crash := re.search(r"signal: (Segmentation fault|Aborted|Illegal)", f"{failure.text} {failure.error.__cause__}"):
        return (
            f"a worker crashed in compiled code ({crash[1]}): num_workers=0 shows where; where that does not crash, "
            'env_cfg=dict(mp_cfg=dict(mp_start_method="spawn"))'
        )
    return "the system ended a worker, mostly for memory: fewer num_workers, a smaller prefetch_factor, more /dev/shm"


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
    "strategy=dict(timeout_s=...) or env_cfg=dict(dist_cfg=dict(timeout=...)), whichever is given, sets the seconds"
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


# The own message of an error in a data worker, which torch sends to the training process as a traceback in text.


_CAUGHT = re.compile(r"Caught (\S+) in DataLoader worker process (\d+)\.")
_TRACEBACK = re.compile(r"^(?:Original )?Traceback \(most recent call last\):$", re.MULTILINE)
_LINE = re.compile(r'^  File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class WorkerFailure:
    """An error that a data worker raised.

    Attributes:
        worker: number of the worker.
        kind: name of the exception's class.
        text: its message, on one line.
        source: file and line of the innermost code outside of torch and this library; empty if there is none.
        function: the function there.
        notes: lines that were added to the exception.
    """

    worker: int
    kind: str
    text: str
    source: str
    function: str
    notes: tuple[str, ...] = ()


def read_worker_failure(error: BaseException) -> WorkerFailure | None:
    """Read the text of an exception that a data worker sent; None if it is none."""
    whole = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    found = _CAUGHT.search(whole)
    if found is None:
        return None
    begins = [match.end() for match in _TRACEBACK.finditer(whole)]
    own = whole[begins[-1] :] if begins else whole[found.end() :]
    rest = [line for line in own.splitlines() if line.strip()]
    at = next((i for i, line in enumerate(rest) if not line.startswith(" ")), None)
    said = [] if at is None else rest[at:]
    kind, _, text = (said[0] if said else found[1]).partition(": ")
    lines = [match for match in _LINE.finditer(own) if not _is_library(match[1])]
    source, function = (f"{lines[-1][1]}:{lines[-1][2]}", lines[-1][3]) if lines else ("", "")
    return WorkerFailure(
        int(found[2]), kind.rpartition(".")[2], " ".join(text.split()), source, function, tuple(said[1:])
    )


def _is_library(file: str) -> bool:
    return "/torch/" in file or file.startswith(_OWN)


_OWN = str(Path(__file__).parents[1])


_COMPILING = (
    "torch.compile failed, which eager mode may not: leave out `compile`, or give compile=dict(fullgraph=False) or "
    'dict(backend="aot_eager"); TORCH_LOGS="+dynamo" says more'
)


@dataclass(frozen=True)
class Reason:
    """Why a run failed.

    Attributes:
        where: to follow "Failed after ...", such as " in backward"; may be empty.
        said: class and message of the error, on one line.
        advice: what to do; empty if the error says it, or if nothing is known.
        samples: indices of the batch that could not be read, at most 16; empty if another part failed.
    """

    where: str
    said: str
    advice: str = ""
    samples: tuple[int, ...] = ()

    @property
    def in_a_line(self) -> str:
        """What was said, and where."""
        return f"{self.said}{f' ({self.where.strip()})' if self.where else ''}"

    @property
    def follows(self) -> bool:
        """Whether it only follows from the end of another process."""
        return re.search(LOST, self.said) is not None


def reason_of(run: Run, error: BaseException) -> Reason:
    """Find out why a run failed; this never raises."""
    try:
        return _reason_of(run, error)
    except Exception as second:  # logged, because it must not hide the error
        run.logger.debug(f"Nothing is known of the failure, {type(second).__name__}: {second}", exc_info=second)
        return Reason("", _first_line(error))


def _reason_of(run: Run, error: BaseException) -> Reason:
    # It names the key, and says what to do; one that a worker sent is torch's text, with the worker's traceback.
    if isinstance(error, FlexTrainError) and read_worker_failure(error) is None:
        return Reason("", _first_line(error))
    origin = find_origin(error, run.strategy.module)
    worker = next((found for cause in causes(error) if (found := read_worker_failure(cause))), None)
    if worker is None:
        kind, text, notes = type(error).__name__, str(error).strip(), tuple(getattr(error, "__notes__", ()))
        where, said = origin.words(), _first_line(error)
    else:
        kind, text, notes = worker.kind, worker.text, worker.notes
        where, said = _of_worker(worker, origin), f"{worker.kind}: {worker.text}"
    if samples := next(filter(None, (origin.samples(), *(note for note in notes if "of the dataset" in note))), ""):
        said = f"{said} ({samples})"
    failure = Failure(run, error, origin, kind, " ".join((text, samples)).strip())
    advice = (
        _COMPILING
        if is_compile_error(error)
        else _of_hook(failure) or explain(run.strategy, error) or advice_on(failure)
    )
    return Reason(where, said, advice or "", tuple(map(int, re.findall(r"\d+", samples))))


def _of_hook(failure: Failure) -> str | None:
    """Advice for a hook that copies the model or computes with its parameters, where each process has parts of them."""
    apart = r"deepcopy|cannot pickle 'torch\._C|DTensor|aten\.|tensor subclass"
    parameters = [*failure.run.strategy.module.parameters()]
    may_be = isinstance(failure.error, (IndexError, RuntimeError, ValueError)) and any(
        p.numel() == 0 for p in parameters
    )
    if failure.origin.kind != "hook" or not (may_be or re.search(apart, failure.text)):
        return None
    shards = any(isinstance(parameter, DTensor) for parameter in parameters)
    return (
        f"under {type(failure.run.strategy).__name__} a process has parts of the parameters, and the model cannot be copied: "
        "EMAHook averages weights; `with flextrain.strategies.parts.full_weights(runner.strategy) as model:` gives whole ones"
        + ("; p.full_tensor() is a whole one, and p.copy_(whole) keeps this process's part" if shards else "")
    )


def _of_worker(worker: WorkerFailure, origin: Origin) -> str:
    inside = ", ".join(filter(None, (f"worker {worker.worker}", worker.function, worker.source)))
    return f" in {origin.loader} ({inside}){' in the dry pass' if origin.is_dry else ''}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
