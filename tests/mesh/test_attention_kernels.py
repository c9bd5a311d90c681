"""The kernels that attention over a shared sequence is computed by: which ones, how often called, and equal to one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flextrain import MeshStrategy
from flextrain.core.comm import collectives as dist
from flextrain.core.torch_compat import attention_private
from flextrain.core.torch_compat.torch_private import fake_mode
from flextrain.strategies.mesh.context import attention as attending
from flextrain.strategies.mesh.context import masks
from flextrain.strategies.mesh.context.attention import Ring, SequenceAttention, ring_attention
from flextrain.strategies.mesh.context.batches import SequenceShards
from flextrain.strategies.mesh.context.masks import CAUSAL, FULL, BatchMasks, Mask, Rule
from flextrain.strategies.mesh.context.scores import USUAL
from flextrain.testing import WorkerGroup

from .rings import Names, Pretended, in_a_ring, on_one_device

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def tensors(
    length: int, heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (8, 8), samples: int = 2, **options: Any
) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output."""
    torch.manual_seed(0)
    sizes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])]
    return [torch.randn(samples, each, length, width, **options) for each, width in sizes]


TAKES_GROUPS = Version(torch.__version__) >= Version("2.15") or attention_private.takes_groups(
    *tensors(20)[:3], None, 0.0, False
)
"""Whether torch's kernels of the CPU take fewer heads of keys than of queries; those of 2.6 do not, and heads are repeated."""


def padded(length: int, *spans: tuple[int, int]) -> Tensor:
    """(samples, length): the positions of each sample that count."""
    at = torch.arange(length)
    return torch.stack([(at >= start) & (at < stop) for start, stop in spans])


def documents(length: int, *starts: list[int]) -> Tensor:
    """(samples, length): the number of each position's document."""
    at = torch.arange(length)
    return torch.stack([sum((at >= start).long() for start in each) + 1 for each in starts])  # type: ignore[misc]


MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda n: Mask(CAUSAL),
    "full": lambda n: Mask(FULL),
    "window": lambda n: Mask(Rule(True, 5)),
    "padding": lambda n: Mask(CAUSAL, padded(n, (3, n), (0, n - 5))),
    "padding, full": lambda n: Mask(FULL, padded(n, (3, n), (0, n - 5))),
    "all of a sample": lambda n: Mask(CAUSAL, padded(n, (0, n), (0, 0))),
    "documents": lambda n: Mask(CAUSAL, None, documents(n, [5, n // 2, n - 1], [1, n // 3])),
    "documents, full": lambda n: Mask(FULL, None, documents(n, [n // 4, n // 2 + 1], [n // 4, n // 2 + 1])),
    "documents with padding": lambda n: Mask(CAUSAL, padded(n, (2, n - 3), (0, n)), documents(n, [7, n // 2], [9])),
    "holes": lambda n: Mask(CAUSAL, padded(n, (0, 4), (0, n)) | padded(n, (6, n), (0, 0))),
    "documents that return": lambda n: Mask(CAUSAL, None, documents(n, [5, 9], [3, 8]) % 2),
}
SHAPES: dict[str, dict[str, Any]] = {
    "odd length": dict(length=18),
    "width 24": dict(length=20, widths=(24, 24)),
    "width 96": dict(length=20, widths=(96, 96)),
    "widths 7 and 5": dict(length=20, widths=(7, 5)),
    "one head of keys": dict(length=20, heads=(3, 1)),
    "float64": dict(length=20, dtype=torch.float64),
    "float16": dict(length=20, dtype=torch.float16),
    "bfloat16": dict(length=20, dtype=torch.bfloat16),
}


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=TOLERANCE[mine.dtype])


@pytest.fixture(autouse=True)
def _short_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "SHORTEST", 1)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "TILE", 7)
    given, allowed = tensors(20), MASKS[mask](20)
    expected = on_one_device(*given, allowed, scale=0.3)
    kernels: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH) if by_hand else nullcontext()
    with kernels, Names() as seen:
        found = in_a_ring(*given, allowed, scale=0.3)
    assert_equal(found, expected)
    is_masked = mask in ("window", "holes", "documents that return")
    assert bool(seen.kernels()) is not (by_hand or is_masked)
    assert ("logsumexp" in seen.names) is (by_hand or is_masked or mask == "documents")  # which has one of one position


@pytest.mark.parametrize("rule", [CAUSAL, FULL])
def test_a_single_key_has_no_kernel(rule: Rule) -> None:
    """Torch's own choice never gives one to cuDNN, which raises for one query with one key."""
    given, mask = tensors(20), MASKS["documents"](20)
    allowed = Mask(rule, mask.keys, mask.documents)
    with Names() as seen:
        found = in_a_ring(*given, allowed)
    assert_equal(found, on_one_device(*given, allowed))
    called = [shapes for name, shapes in zip(seen.names, seen.shapes, strict=True) if name.startswith("_scaled_dot")]
    forward = [(query[2], key[2]) for query, key, *rest in called if len(rest) == 1]
    assert len(forward) > 4
    assert all(keys > 1 for _, keys in forward)
    assert "logsumexp" in seen.names  # the one that is computed by hand


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_shapes(mask: str, shape: str) -> None:
    given, allowed = tensors(**SHAPES[shape]), MASKS[mask](SHAPES[shape]["length"])
    with Names() as seen:
        found = in_a_ring(*given, allowed)
    assert_equal(found, on_one_device(*given, allowed))
    assert seen.kernels()


@pytest.mark.parametrize(
    "mask", ["causal", "padding", "documents", "documents with padding", "window", "all of a sample"]
)
def test_a_whole_sequence_on_a_process(mask: str) -> None:
    """What Ulysses computes between its exchanges."""
    given, allowed = tensors(512, heads=(4, 2), samples=2), MASKS[mask](512)
    inputs = [tensor.requires_grad_() for tensor in given[:3]]
    with Names() as seen:
        found = attending._whole_attention(*inputs, allowed, None, 0.0)
        gradients = torch.autograd.grad(found, inputs, given[3])
    assert_equal([found.detach(), *gradients], on_one_device(*given, allowed))
    if mask != "window":
        assert seen.largest < 512 * 512  # no mask, and no scores
    if mask != "documents":  # of which one is a single key, which is computed by hand
        assert any("repeat" in name or "expand" in name for name in seen.names) is not TAKES_GROUPS
    assert all(
        seen.shapes[at][1][1] == (2 if TAKES_GROUPS else 4)  # heads of keys, and as many in kernels
        for at, name in enumerate(seen.names)
        if name.startswith("_scaled_dot") and "backward" not in name
    )


def test_a_mask_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(Mask, "tile", lambda *given, tile=Mask.tile: made.append(given) or tile(*given))
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0])
    attention = SequenceAttention("ulysses", OneProcess())  # type: ignore[arg-type]
    for batch in range(2):
        attention.masks = BatchMasks(keys=padded(64, (batch, 64), (0, 60)))
        for rule in (CAUSAL, Rule(True, 9)):
            for _ in range(3):
                attending._whole_attention(*tensors(64)[:3], attention.masks.of(rule), None, 0.0)
    assert len(made) == 2  # for each batch that of the window; padding is computed without


class OneProcess:
    """A mesh of one process."""

    device_type = "cpu"
    size, get_local_rank, get_group = (lambda self: 1), (lambda self: 0), (lambda self: None)


def test_dropout_keeps_the_mask() -> None:
    mask = Mask(CAUSAL, None, documents(256, [100], [100]))
    query, key, value, _ = tensors(256)
    found = attending._whole_attention(query, key, torch.ones_like(value), mask, None, 0.5)
    assert (found - 1.0).abs().mean() > 0.05  # some weights are dropped, the others larger
    assert found.mean() == pytest.approx(1.0, abs=0.1)
    changed = key.clone()
    changed[:, :, :100] += 1.0  # of another document
    torch.manual_seed(1)
    one = attending._whole_attention(query, key, value, mask, None, 0.5)
    torch.manual_seed(1)
    other = attending._whole_attention(query, changed, value, mask, None, 0.5)
    assert torch.equal(one[:, :, 100:], other[:, :, 100:])


# How it is called by models


def _ring(length: int = 20) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """Tensors of one of two pretended processes, and attention to both."""
    shards = SequenceShards(length, 2, True)
    own, others = ([shards.cut(tensor, 2, index) for tensor in tensors(length)] for index in (1, 0))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(query, key, value, Mask(CAUSAL), None, shards, Pretended(None, 1, [0, 1], others[1:3]))

    return own, attend


def test_gradients_of_some_inputs_and_of_two_backwards() -> None:
    own, attend = _ring()
    inputs = [tensor.detach().clone().requires_grad_() for tensor in own[:3]]
    expected = torch.autograd.grad(attend(*inputs), inputs, own[3])
    for at in range(3):
        some = [tensor.detach().requires_grad_(at == i) for i, tensor in enumerate(inputs)]
        (found,) = torch.autograd.grad(attend(*some), [some[at]], own[3])
        assert torch.equal(found, expected[at])
    ring = Ring(None, 0, [0])
    out = ring_attention(*inputs, Mask(CAUSAL), None, SequenceShards(10, 1, False), ring)
    first, second = (torch.autograd.grad(out, inputs, own[3], retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_checkpoints_and_evaluation() -> None:
    own, attend = _ring()
    inputs = [tensor.detach().clone().requires_grad_() for tensor in own[:3]]
    out = attend(*inputs)
    expected = torch.autograd.grad(out, inputs, own[3])
    again = checkpoint(attend, *inputs, use_reentrant=False)
    assert torch.equal(again, out)
    found = torch.autograd.grad(again, inputs, own[3])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(attend(*inputs), out)
    with torch.inference_mode():
        assert torch.equal(attend(*inputs), out)


def test_gradients_without_memory_of_their_own_and_heads_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a sum have one number in memory; heads may lie beside each other. Kernels of accelerators take neither."""
    backward, strides = attention_private.AttentionKernel.backward, set()

    def look(self: Any, *given: Any) -> Any:
        strides.update(tensor.stride(-1) for tensor in given[:4])
        return backward(self, *given)

    monkeypatch.setattr(attention_private.AttentionKernel, "backward", look)
    own, attend = _ring()
    inputs = [tensor.transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for tensor in own[:3]]
    usual = [tensor.detach().contiguous().requires_grad_() for tensor in own[:3]]
    found = torch.autograd.grad(attend(*inputs).sum(), inputs)
    assert strides == {1}
    out = attend(*usual)
    expected = torch.autograd.grad(out, usual, torch.ones_like(out))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_is_no_number_is_not_hidden() -> None:
    own, attend = _ring()
    own[2][0, 0, 3, 0] = torch.nan  # queries attend to it from here on
    found = attend(*own[:3])
    assert found[0, :2, 3:, 0].isnan().all()
    assert not found[1].isnan().any()


# Which kernels


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"),
    reason="torch 2.6 asks the driver for tensors of CUDA that have no values",
)
@pytest.mark.parametrize(
    "dtype, choice, kernel, repeats",
    [
        (torch.bfloat16, None, "flash", False),
        (torch.float32, None, "efficient", True),
        (torch.float16, SDPBackend.CUDNN_ATTENTION, "cudnn", False),
    ],
)
def test_kernels_of_cuda(
    dtype: torch.dtype, choice: SDPBackend | None, kernel: str, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without values call the operators as they are declared, and get the shapes that these give."""
    if choice is not None:
        monkeypatch.setattr(attention_private, "_choice", lambda *_: choice.value)
    with fake_mode():
        *inputs, gradient = tensors(38, widths=(24, 24), dtype=dtype, device="cuda")
        ring = Pretended(None, 1, [0, 1], [torch.empty_like(tensor) for tensor in inputs[1:]])
        with Names() as seen:
            found, gradients = _both_ways(inputs, gradient, ring)
    name = f"_scaled_dot_product_{kernel}_attention"
    assert seen.kernels() == [name] * 2 + [f"{name}_backward"] * 2
    assert not any(one in seen.names for one in ("bmm", "mm", "_softmax"))
    assert found.shape == gradients[0].shape == (2, 4, 38, 24)
    assert gradients[1].shape == gradients[2].shape == (2, 2, 38, 24)
    heads = {
        shapes[1][1]
        for name, shapes in zip(seen.names, seen.shapes, strict=True)
        if name.endswith(f"{kernel}_attention")
    }
    assert heads == {4 if repeats else 2}
    if kernel == "efficient":  # whose backward reads sums in steps of 32, and outputs position by position
        at = [number for number, name in enumerate(seen.names) if name.endswith("_backward")]
        assert [seen.shapes[number][-3] for number in at] == [(2, 4, 64)] * 2
        assert [seen.strides[number][-4] for number in at] == [(38 * 4 * 24, 24, 4 * 24, 1)] * 2


def _both_ways(inputs: list[Tensor], gradient: Tensor, ring: Pretended) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients, without autograd, which needs the device."""
    context = SimpleNamespace(save_for_backward=lambda *saved: setattr(context, "saved_tensors", saved))
    kernel = attention_private.attention_kernel(*inputs)
    shards = SequenceShards(76, 2, False)
    blocks = attending._Blocks(Mask(CAUSAL), 0.2, shards, ring, kernel, USUAL, shards)
    found = attending._RingAttention.forward(context, *inputs, None, None, blocks)
    return found, attending._RingAttention.backward(context, gradient)[:3]  # type: ignore[return-value]


def test_a_device_without_a_choice_of_its_own_computes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_private, "_has", lambda name, device: False)
    query, key, value, _ = tensors(20)
    assert attention_private.attention_kernel(query, key, value) is None
    assert not attention_private.takes_groups(query, key, value, None, 0.0, False)


def test_a_user_may_leave_no_kernel() -> None:
    query, key, value, _ = tensors(20)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # which the CPU does not have
        assert not attention_private.takes_groups(query, key, value, None, 0.0, False)
        with pytest.raises(RuntimeError, match="[Nn]o .*(viable|available)"):
            attention_private.attention_kernel(query, key, value)


@dataclass(frozen=True)
class Logged(Ring):
    """A ring whose messages come back, and that says when."""

    events: list[str] = field(default_factory=list)

    def send_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See Ring."""
        self.events.append("send")

        def wait() -> Tensor:
            self.events.append("wait")
            return tensor.clone()

        return wait


def test_messages_are_on_their_way_while_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Logged(None, 2, [0, 1, 2])
    for way in ("forward", "backward"):
        own = getattr(attending._Blocks, way)
        monkeypatch.setattr(
            attending._Blocks, way, lambda *a, own=own, **k: ring.events.append("kernel") or own(*a, **k)
        )
    *inputs, gradient = tensors(10)
    out = ring_attention(
        *(one.requires_grad_() for one in inputs), Mask(FULL), None, SequenceShards(30, 3, False), ring
    )
    assert " ".join(ring.events) == "send kernel wait send kernel wait kernel"
    ring.events.clear()
    torch.autograd.grad(out, inputs, gradient)
    # Gradients leave after the second kernel, and are waited for after the third one.
    assert " ".join(ring.events) == "send kernel wait send kernel send wait kernel wait send wait"


def operations(kind: str) -> tuple[int, int]:
    """In a worker: the operations of a layer, in forward and in backward."""
    torch.set_num_threads(1)
    strategy = MeshStrategy(device="cpu", cp=2)
    strategy.join()
    attention = SequenceAttention(kind, strategy.layout.over("cp"))
    inputs = [tensor.requires_grad_() for tensor in tensors(2048, samples=1)[:3]]
    with Names() as first:
        found = attention(*inputs, attention.masks.of(CAUSAL), None, 0.0, "test")
    with Names() as second:
        torch.autograd.grad(found, inputs, torch.ones_like(found))
    assert len(first.kernels() + second.kernels()) == (4 if kind == "ring" else 2)
    strategy.leave()
    dist.destroy_process_group()
    return len(first.names), len(second.names)


@pytest.mark.full
@pytest.mark.distributed
def test_operations_of_a_layer(workers2: WorkerGroup) -> None:
    """On an accelerator each costs the host microseconds: 4,096 positions over two processes."""
    repeating = 0 if TAKES_GROUPS else 15
    for forward, backward in workers2.run(operations, "ring"):
        assert forward + backward < 40 + repeating
    for forward, backward in workers2.run(operations, "ulysses"):
        assert forward + backward < 70 + repeating
