"""Train a small GPT on Python's own documentation, byte by byte, and generate text with it.

    python examples/language_model.py
    torchrun --nproc-per-node 2 examples/language_model.py
    torchrun --nproc-per-node 2 examples/language_model.py --use-fsdp --bf16
    torchrun --nproc-per-node 2 examples/language_model.py --use-deepspeed --zero-stage 3 --bf16
    torchrun --nproc-per-node 4 examples/language_model.py --mesh tp=2,dp_shard=2
    torchrun --nproc-per-node 8 examples/language_model.py --use-fsdp --bf16 --compile \
        --layers 12 --dim 768 --heads 12 --context 1024 --steps 2000 --lr 6e-4 --peak-tflops 989

Log lines show tokens per second of all processes, and the model FLOP utilisation. The training text is what help() shows
about keywords and topics. It comes with Python: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from flextrain import STRATEGIES, BaseMetric, FlexibleRunner, Hook, __version__

VOCABULARY = 256
LOG_INTERVAL = 10


class Linear(nn.Linear):
    """A linear layer without bias, with normally distributed weights.

    The weights are drawn here and not by the model, because ZeRO stage 3 splits a layer as soon as it is complete.
    """

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=std)


class Embedding(nn.Embedding):
    """An embedding with normally distributed weights."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__(size, dim)
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """A pre-norm transformer block: attention and a two-layer network."""

    def __init__(self, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        # 2 * layers outputs are summed; the sum should not grow with depth.
        added = 0.02 / math.sqrt(2 * layers)
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim, std=added)
        self.norm2 = nn.LayerNorm(dim)
        self.up = Linear(dim, 4 * dim)
        self.down = Linear(4 * dim, dim, std=added)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Next-byte logits, or the loss of each sequence, from up to ``context`` bytes.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self, layers: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = Embedding(VOCABULARY, dim)
        self.positions = Embedding(context, dim)
        # In a ModuleList, where FSDPStrategy(wrap="blocks") finds them.
        self.blocks = nn.ModuleList(Block(dim, heads, layers) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = Linear(dim, VOCABULARY)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor | None = None, mode: str = "tensor") -> Any:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        # Logits in bfloat16 have three digits, too few for a loss.
        logits = self.head(self.norm(x)).float()
        if mode == "tensor":
            return logits
        assert targets is not None
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)
        return {"loss": losses.mean()} if mode == "loss" else losses

    def generate(self, written: Tensor, length: int) -> Tensor:
        """``written``, of shape (1, bytes), and ``length`` bytes more; runner.generate calls it with whole weights."""
        for _ in range(length):
            # A temperature of 0.8 gives fewer unlikely bytes.
            probabilities = (self(written[:, -self.context :])[:, -1].cpu() / 0.8).softmax(dim=-1)
            written = torch.cat([written, torch.multinomial(probabilities, 1).to(written.device)], dim=1)
        return written


class Documentation(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of ``context`` bytes, each with the bytes that follow; the last sixteenth of the text is for validation."""

    def __init__(self, context: int, train: bool) -> None:
        text = "\n\n".join(pydoc_data.topics.topics.values()).encode()
        split = len(text) * 15 // 16
        self.text = torch.frombuffer(bytearray(text[:split] if train else text[split:]), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.text[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class BytesLoss(BaseMetric):
    """The mean loss, also in bits per byte: the size that an ideal compressor with this model would reach."""

    def process(self, data_batch: Any, data_samples: Tensor) -> None:
        self.results.extend(data_samples.tolist())

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        loss = sum(results) / len(results)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}


class ThroughputHook(Hook):
    """Adds tokens per second of all processes and the model FLOP utilisation (MFU) to the log line.

    MFU is the FLOP/s that the model needs at the observed speed, divided by the hardware's peak FLOP/s:

        MFU = tokens/s * (6 N + 12 L H Q T) / (processes * peak FLOP/s of one)

    with N parameters, L layers of H heads of size Q, and sequences of T tokens. Every parameter takes part in one
    multiplication and addition in forward and two in backward, which gives 6. Attention adds two products of T * Q per head,
    with the same factor. Recomputed activations count once. As in the source, the formula ignores that causal attention
    needs only half of the products.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.

    Args:
        flops_per_token: 6 N + 12 L H Q T.
        peak_tflops: peak of one process's device; None: measured with a large matrix product when training starts.
        dtype: dtype of that measurement.
        window: number of iterations over which time is measured. Only a log line waits for the device; between log lines,
            the time of an iteration is the time to launch its work, not to do it.
    """

    def __init__(
        self, flops_per_token: float, peak_tflops: float | None, dtype: torch.dtype, window: int = LOG_INTERVAL
    ) -> None:
        self.flops_per_token = flops_per_token
        self.peak = None if peak_tflops is None else peak_tflops * 1e12
        self.dtype = dtype
        self._ends: deque[float] = deque(maxlen=window + 1)

    def before_train(self, runner: FlexibleRunner) -> None:
        self._ends.clear()
        if self.peak is None:
            self.peak = measured_peak(runner.strategy.device, self.dtype)
            runner.logger.info(
                f"A matrix product reaches {self.peak / 1e12:.3g} TFLOP/s in {self.dtype}: the peak for MFU"
            )

    def after_train_iter(
        self,
        runner: FlexibleRunner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        # The first iteration only starts the clock, because much of it is preparation.
        self._ends.append(time.perf_counter())
        if len(self._ends) < 2:
            return
        assert self.peak is not None
        batches = data_batch if runner.accumulate > 1 else [data_batch]
        tokens = runner.strategy.topology.data.count * sum(inputs.numel() for inputs, _ in batches)
        per_second = tokens * (len(self._ends) - 1) / (self._ends[-1] - self._ends[0])
        runner.message_hub.update_scalar("train/tokens_per_s", per_second)
        mfu = per_second * self.flops_per_token / (runner.world_size * self.peak)
        runner.message_hub.update_scalar("train/mfu", mfu)

    def after_val(self, runner: FlexibleRunner) -> None:
        # The time of a validation does not count as training time.
        self._ends.clear()


def flops_per_token(layers: int, dim: int, heads: int, context: int) -> float:
    """6 N + 12 L H Q T. The token embedding counts, because the head uses the same matrix; the position embedding does not."""
    with torch.device("meta"):
        model = GPT(layers, dim, heads, context)
    multiplied = sum(p.numel() for p in model.parameters()) - model.positions.weight.numel()
    return 6 * multiplied + 12 * layers * dim * context


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several products of square matrices."""
    size = 1024 if device.type == "cpu" else 8192
    # A separate generator, so that the measurement does not change the training.
    matrix = torch.randn(size, size, device=device, generator=torch.Generator(device)).to(dtype)
    fastest = math.inf
    for _ in range(10):
        start = time.perf_counter()
        matrix @ matrix
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def dataloader(arguments: argparse.Namespace, train: bool) -> dict[str, Any]:
    return dict(
        batch_size=arguments.batch_size,
        dataset=Documentation(arguments.context, train),
        sampler=dict(type="InfiniteSampler") if train else dict(type="DefaultSampler", shuffle=False),
        collate_fn=dict(type="default_collate"),
    )


def choose_strategy(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The strategy of the flags; None: chosen by the number of processes."""
    if arguments.use_fsdp:
        precision = dict(mixed_precision=dict(param_dtype="bfloat16")) if arguments.bf16 else {}
        return dict(type="FSDPStrategy", wrap="blocks", **precision)
    if arguments.mesh:
        precision = dict(mixed_precision=dict(param_dtype="bfloat16")) if arguments.bf16 else {}
        return dict(type=f"mesh:{arguments.mesh}", wrap="blocks", **precision)
    if arguments.use_deepspeed:
        precision = dict(bf16=dict(enabled=True)) if arguments.bf16 else {}
        return dict(type="DeepSpeedStrategy", zero_optimization=dict(stage=arguments.zero_stage), **precision)
    return None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    strategy = parser.add_mutually_exclusive_group()
    strategy.add_argument("--use-fsdp", action="store_true", help="FSDP: every process holds a part of the model")
    strategy.add_argument(
        "--use-deepspeed", action="store_true", help="DeepSpeed's ZeRO: every process holds a part of the model"
    )
    strategy.add_argument("--mesh", help="several kinds of parallelism: tp=2,dp_shard=2")
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=2, help="with --use-deepspeed")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--val-interval", type=int, help="steps between validations; default: a quarter of all steps")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-tflops", type=float, help="peak of one device, from its data sheet; default: measured")
    parser.add_argument("--prompt", default='The "with" statement', help="beginning of the generated text")
    parser.add_argument("--sample-length", type=int, default=200, help="number of bytes to generate at the end")
    parser.add_argument("--work-dir", default="work_dirs/language_model")
    arguments = parser.parse_args()
    if arguments.dim % arguments.heads:
        parser.error(f"--dim: {arguments.dim} is not a multiple of --heads {arguments.heads}")
    for flag, name in (("use_fsdp", "FSDPStrategy"), ("use_deepspeed", "DeepSpeedStrategy")):
        if getattr(arguments, flag) and name not in STRATEGIES:
            parser.error(f"--{flag.replace('_', '-')}: flextrain {__version__} has no {name} yet")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    steps = arguments.steps
    size = dict(layers=arguments.layers, dim=arguments.dim, heads=arguments.heads, context=arguments.context)
    strategy = choose_strategy(arguments)
    # A strategy that computes in bfloat16 itself needs no autocast.
    autocast = arguments.bf16 and strategy is None
    precision = dict(type="AmpOptimWrapper", dtype="bfloat16") if autocast else dict(type="OptimWrapper")
    warmup = steps // 10
    schedule = [dict(type="CosineAnnealingLR", by_epoch=False, begin=warmup, end=steps, eta_min_ratio=0.1)]
    if warmup:
        schedule.insert(0, dict(type="LinearLR", by_epoch=False, start_factor=0.1, end=warmup))
    throughput = dict(
        type=ThroughputHook,
        flops_per_token=flops_per_token(**size),
        peak_tflops=arguments.peak_tflops,
        dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
    )
    runner = FlexibleRunner(
        model=lambda: GPT(**size),
        work_dir=arguments.work_dir,
        strategy=strategy,
        train_dataloader=dataloader(arguments, train=True),
        optim_wrapper=dict(
            **precision,
            optimizer=dict(type="AdamW", lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1),
            paramwise_cfg=dict(norm_decay_mult=0.0),
            accumulative_counts=arguments.accumulate,
            clip_grad=dict(max_norm=1.0),
        ),
        param_scheduler=schedule,
        train_cfg=dict(by_epoch=False, max_iters=steps, val_interval=arguments.val_interval or max(1, steps // 4)),
        val_dataloader=dataloader(arguments, train=False),
        val_cfg=dict(),
        val_evaluator=dict(type=BytesLoss),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=LOG_INTERVAL),
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=steps, overwrite=True),
        ),
        custom_hooks=[throughput],
        randomness=dict(seed=arguments.seed),
        compile=arguments.compile,
    )
    runner.train()
    prompt = torch.tensor([list(arguments.prompt.encode())])
    written = runner.generate(prompt if runner.rank == 0 else None, length=arguments.sample_length, seed=0)
    if written is not None:
        print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
