"""Tokens per second and model FLOP utilisation."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from flextrain.core.base.errors import ConfigError
from flextrain.testing import WorkerGroup
from flextrain.token_rate import TokenRateHook

from .folders import LENGTH, model_of, runner_of, tokens

IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])


def llama() -> Any:
    return model_of("llama", attn_implementation="eager")


def train(work_dir: Path, hook: dict[str, Any], strategy: Any = "single", **more: Any) -> tuple[dict[str, float], str]:
    """The newest values of the hook's scalars, and the lines of the log."""
    runner = runner_of(
        work_dir,
        dict(type=llama),
        strategy=strategy,
        custom_hooks=[dict(type="TokenRateHook", **hook)],
        log_level="INFO",
        **more,
    )
    runner.train()
    hub = runner.message_hub.log_scalars
    found = {name: hub[f"train/{name}"].current() for name in ("tokens_per_s", "mfu") if f"train/{name}" in hub}
    text = "".join(file.read_text() for file in sorted(Path(runner.log_dir).glob("*.log")))
    runner.close()
    return found, text


def trained_on(text: str) -> int:
    found = re.search(r"Trained on ([\d,]+) tokens", text)
    assert found is not None
    return int(found[1].replace(",", ""))


def test_a_share_of_the_peak_is_logged(tmp_path: Path) -> None:
    found, text = train(tmp_path, dict(peak=1e12, flops_per_token=5e3))
    assert found["tokens_per_s"] > 0
    assert found["mfu"] == pytest.approx(found["tokens_per_s"] * 5e3 / 1e12)
    assert trained_on(text) == 2 * (LENGTH + LENGTH - 3)  # one of two samples has padding
    assert "tokens_per_s: " in text
    assert "mfu: " in text
    assert "model FLOP utilisation" in text


class Clock:
    """Stands in for the module time: each look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


def test_the_dry_pass_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("flextrain.token_rate.time", clock)
    rates: list[float] = []
    runner: Any = SimpleNamespace(
        message_hub=SimpleNamespace(history=lambda name: SimpleNamespace(put=rates.append)),
        strategy=SimpleNamespace(topology=SimpleNamespace(data=SimpleNamespace(count=1))),
        accumulate=1,
        train_loop=SimpleNamespace(ends_with_filler=False),
    )
    hook = TokenRateHook(mfu=False)
    hook.before_train(runner)
    clock.now += 100.0  # the dry pass
    hook.before_train_epoch(runner)
    hook.after_train_iter(runner, 0, {"input_ids": IDS})
    hook.before_train_epoch(runner)  # what is done between epochs counts
    hook.after_train_iter(runner, 1, {"input_ids": IDS})
    assert rates == [6.0, 6.0]


def test_accumulated_micro_batches_count(tmp_path: Path) -> None:
    optim = dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2)
    _, text = train(tmp_path, dict(mfu=False), optim_wrapper=optim)
    assert trained_on(text) == 4 * (LENGTH + LENGTH - 3)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy, factor",
    [("fsdp", 2), pytest.param(dict(type="mesh", pp=2), 1, marks=pytest.mark.full)],
    ids=["fsdp", "pp2"],
)
def test_all_processes_with_their_own_data_count(
    workers2: WorkerGroup, tmp_path: Path, strategy: Any, factor: int
) -> None:
    # Under FSDP, rank 0 reads the samples without padding.
    (found, text), _ = workers2.run(train, tmp_path, dict(peak="h100"), strategy)
    assert trained_on(text) == factor * 2 * (2 * LENGTH if factor == 2 else 2 * LENGTH - 3)
    assert 0 < found["mfu"] < 1


def test_without_a_known_peak_it_is_left_out_and_said(tmp_path: Path) -> None:
    found, text = train(tmp_path, {})
    assert found.keys() == {"tokens_per_s"}
    assert text.count("mfu is left out: no peak is known for cpu in float32; give custom_hooks[0].peak") == 1


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_near_what_torch_counts(tmp_path: Path, tied: bool) -> None:
    from flextrain.token_rate import _flops_per_token

    runner = runner_of(
        tmp_path, dict(type=lambda: model_of("llama", attn_implementation="eager", tie_word_embeddings=tied))
    )
    model: Any = runner.model
    sample = {key: value[None] for key, value in tokens(1)[0].items()}
    with FlopCounterMode(display=False) as counter:
        model(**sample).loss.backward()
    counted = counter.get_total_flops() / LENGTH
    assert _flops_per_token(runner, LENGTH) == pytest.approx(counted, rel=0.1)
    runner.close()


@pytest.mark.parametrize(
    "batch, count",
    [
        ({"input_ids": IDS, "attention_mask": (IDS > 0).long()}, 5),
        ({"input_ids": IDS}, 6),
        ({"input_ids": IDS, "attention_mask": torch.zeros(2, 1, 3, 3)}, 6),
        ({"input_ids": IDS, "attention_mask": (IDS > 0).to("meta")}, 6),
        ({"labels": IDS.masked_fill(IDS == 0, -100)}, 5),
    ],
)
def test_the_tokens_of_a_batch(batch: dict[str, Any], count: int) -> None:
    assert TokenRateHook()._count(batch) == count


@pytest.mark.parametrize(
    "hook, message",
    [
        (dict(peak=0), r"custom_hooks\[0\].peak: 0 is not allowed, give operations above 0"),
        (dict(peak=312), r"custom_hooks\[0\].peak: 312 is not allowed, .*: 312 TFLOP/s are 312e12"),
        (dict(peak=-1e12), r"custom_hooks\[0\].peak: -1e\+?12.0?|custom_hooks"),
        (dict(flops_per_token=0.0), r"custom_hooks\[0\].flops_per_token: 0.0 is not allowed"),
        (dict(peak="h1000"), r'custom_hooks\[0\].peak: "h1000" is not known.*did you mean "h100"'),
        (dict(mfu=False, peak=1e12), r"custom_hooks\[0\].peak: has no effect with mfu=False"),
        (dict(peek=1e12), r'custom_hooks\[0\].peek: .*did you mean "peak"'),
    ],
)
def test_wrong_options_are_told_in_a_line(tmp_path: Path, hook: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        runner_of(tmp_path, dict(type=llama), custom_hooks=[dict(type="TokenRateHook", **hook)])
    assert "\n" not in str(raised.value)


def test_a_batch_without_tokens_is_told_in_a_line() -> None:
    with pytest.raises(
        ConfigError, match="counts attention_mask, input_ids or labels, and the batch has pixels; remove"
    ):
        TokenRateHook()._count({"pixels": IDS})
