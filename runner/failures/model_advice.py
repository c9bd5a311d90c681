"""Advice on errors of forward, backward and the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import Tensor, nn
from torch.utils.data import default_collate

from .advice import Failure, rule

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
