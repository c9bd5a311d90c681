"""examples/fine_tuning.py: a folder's model, trained and asked under every strategy, and the folder that comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flextrain.testing import WorkerGroup
from flextrain.testing.loop import alone

from .conftest import RunExample
from .recipes import Watch, make, means, recipe, same, whole

pytest.importorskip("transformers")

SIZE = ("--max-iters", "16")
STRATEGIES = [
    pytest.param("ddp", "8", marks=pytest.mark.full),
    ("fsdp", "8"),
    pytest.param("zero2", "8", marks=[pytest.mark.full, pytest.mark.deepspeed]),
    pytest.param("zero3", "8", marks=[pytest.mark.full, pytest.mark.deepspeed]),
    pytest.param("mesh:tp=2", "16", marks=pytest.mark.full),
]


def trained(folder: Path, flags: tuple[str, ...], export: Path | None = None) -> dict[str, Any]:
    """Train; losses, metrics, whole weights, and the answers of the model to questions of different lengths."""
    module = recipe("fine_tuning")
    runner = make("fine_tuning", folder, (*SIZE, *flags))
    runner.register_hook(watch := Watch(None))
    try:
        runner.train()
        tokenizer = module.AutoTokenizer.from_pretrained(folder / "base")
        said = [module.ask(runner, tokenizer, module.WORDS[:count]) for count in (2, 3, 4)]
        if export is not None:
            runner.export_hugging_face(export)
        names = {name for name, _ in runner.strategy.parameters()}
        state = runner.strategy.model_state()
        weights = {name: whole(state[name]) for name in names}
    finally:
        runner.strategy.leave()
    losses = [float(loss) for loss in watch.losses]
    return dict(losses=losses, metrics=watch.metrics, weights=weights, said=said, optimized=names)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with alone():
        found = trained(tmp_path_factory.mktemp("alone"), ("--batch-size", "16"))
    assert found["losses"][-1] < found["losses"][0]
    assert all(found["said"]), "a model that has learnt little says something"
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("strategy, batch", STRATEGIES)
def test_two_processes_train_and_answer_as_one_device(
    tmp_path: Path, workers2: WorkerGroup, expected: dict[str, Any], strategy: str, batch: str
) -> None:
    flags = ("--strategy", strategy, "--batch-size", batch)
    found = workers2.run(trained, tmp_path / "run", flags, tmp_path / "exported")
    module = recipe("fine_tuning")
    exported = module.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokenizer = module.AutoTokenizer.from_pretrained(tmp_path / "exported")
    said = [module.ask(exported, tokenizer, module.WORDS[:count]) for count in (2, 3, 4)]
    assert [one["said"] for one in found] == [said, said] == [expected["said"]] * 2
    assert means(found) == pytest.approx(expected["losses"], rel=1e-5)
    for one in found:
        same(one, expected, 1e-4)
        assert one["metrics"][-1] == pytest.approx(expected["metrics"][-1], rel=1e-4)
    weights = exported.state_dict()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-4)


def test_the_metric_counts_whole_answers_only(tmp_path: Path) -> None:
    """With a model that always answers the first question rightly."""
    module = recipe("fine_tuning")
    module.write_base(tmp_path / "base")
    module.write_base(tmp_path / "base")  # as another process would
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    tokenizer = module.AutoTokenizer.from_pretrained(tmp_path / "base")
    samples = [module.Reversals(tokenizer, 8)[index] for index in range(8)]
    batch = module.Collate(tokenizer.pad_token_id)(samples)
    lengths = {len(sample["input_ids"]) for sample in samples}
    assert len(lengths) > 1
    assert batch["input_ids"].shape == batch["labels"].shape == (8, max(lengths))
    labels = [sample["labels"][sample["labels"] != module.IGNORED] for sample in samples]

    class Knows(torch.nn.Module):
        def generate(self, input_ids: Any, attention_mask: Any, **options: Any) -> Any:
            assert attention_mask[:, -1].all(), "padded on the left"
            assert not attention_mask.all(), "and padded at all"
            assert not input_ids[attention_mask == 0].any()
            rows = torch.zeros(8, options["max_new_tokens"], dtype=torch.long)
            for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
                row[: len(label)] = label
                if number >= 6:  # wrong at the end, and not ended
                    row[len(label) - 1] = label[0]
            return torch.cat([input_ids, rows], 1)

    class Known(module.ExactMatch):  # type: ignore[misc, name-defined]
        model = Knows()

    metric = Known(tokenizer)
    metric.process(batch, None)
    assert metric.compute_metrics(metric.results) == {"exact_match": 75}


@pytest.mark.full
@pytest.mark.distributed
def test_the_script_exports_what_it_has_learnt(run_example: RunExample, tmp_path: Path) -> None:
    """It learns on two processes, is asked, and the folder gives the same answer."""
    flags = ("--max-iters", "300", "--batch-size", "16", "--strategy", "fsdp", "--export", "reverses")
    done = run_example("fine_tuning.py", *flags, processes=2)
    assert done.stdout.count("reverse red green blue : blue green red\n") == 1
    assert done.stdout.count("reverses says: blue green red\n") == 1
