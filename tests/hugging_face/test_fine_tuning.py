"""A fine-tuning from end to end: FSDP in bfloat16 with recomputation and frozen embeddings, resumed by ZeRO, exported, and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

from flextrain import BaseMetric, Hook
from flextrain.testing import WorkerGroup

from .folders import runner_of, save_folder, save_tokenizer, tokens

FSDP = dict(
    type="fsdp", wrap="blocks", mixed_precision=dict(param_dtype="bfloat16"), activation_checkpointing="model"
)  # fmt: skip
ZERO2 = dict(type="zero2", activation_checkpointing="model")


def classifier(folder: Path) -> Any:
    """As a class of transformers, whose embeddings are frozen."""
    from transformers import LlamaForSequenceClassification

    class FrozenForSequenceClassification(LlamaForSequenceClassification):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.get_input_embeddings().requires_grad_(False)

    return dict(type=FrozenForSequenceClassification, pretrained=str(folder), num_labels=2)


class Losses(Hook):
    def __init__(self) -> None:
        self.kept: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.kept.append(float(outputs["loss"]))


def train(work_dir: Path, folder: Path, strategy: Any, updates: int, resume: bool) -> list[float]:
    hook = Losses()
    runner = runner_of(
        work_dir,
        classifier(folder),
        strategy=strategy,
        lr=0.05,
        train_cfg=dict(by_epoch=False, max_iters=updates),
        train_dataloader=dict(dataset=tokens(labels=2), batch_size=2, collate_fn="default_collate"),
        optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=5e-3), clip_grad=dict(max_norm=1.0)),
        custom_hooks=[hook, dict(type="TokenRateHook", peak=1e12)],
        val_dataloader=dict(dataset=tokens(7, labels=2), batch_size=2, collate_fn="default_collate"),
        val_cfg=dict(),
        val_evaluator=dict(type=Correct),
        resume=resume,
    )
    runner.train()
    if resume:
        runner.export_hugging_face(work_dir / "exported")
    runner.close()
    return hook.kept


class Correct(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += (data_samples.logits.argmax(-1).cpu() == data_batch["labels"].cpu()).tolist()

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": sum(results) / len(results)}


@pytest.mark.distributed
@pytest.mark.full
def test_fsdp_then_zero_then_from_pretrained(workers2: WorkerGroup, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = tmp_path / "base"
    save_folder(base, dtype=torch.bfloat16, shard="20KB")
    save_tokenizer(base)
    first = workers2.run(train, tmp_path / "run", base, FSDP, 4, False)
    second = workers2.run(train, tmp_path / "run", base, ZERO2, 12, True)
    assert [len(losses) for losses in (*first, *second)] == [4, 4, 8, 8]
    model, found = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "exported", output_loading_info=True
    )
    assert not any(found.values())
    assert isinstance(model, nn.Module)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.use_cache is True
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "exported")("one two")["input_ids"]
    frozen = {k: v for file in base.glob("*.safetensors") for k, v in load_file(file).items() if "embed" in k}
    for name, tensor in frozen.items():
        assert torch.equal(model.state_dict()[name], tensor.float())
    batch = {key: torch.stack([sample[key] for sample in tokens(labels=2)]) for key in tokens(1, labels=2)[0]}
    assert float(model.eval()(**batch).loss) < 0.6  # untrained: log(2)
