"""Weights from checkpoints and files of others, and checkpoints that cannot be resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flextrain import CheckpointError, ConfigError, FlexibleRunner
from flextrain.core.comm import collectives as dist
from flextrain.runner.hooks import Hook
from flextrain.testing import WorkerGroup

from .training import (
    SGD,
    Net,
    Samples,
    SaveEvery,
    change_values,
    configuration,
    log_lines,
    make_runner,
    refuses,
    validation,
)

pytestmark = pytest.mark.usefixtures("quick")

State = dict[str, Tensor]


def some_weights(width: int = 8) -> State:
    torch.manual_seed(11)
    return {name: tensor + 1 for name, tensor in Net(width).state_dict().items()}


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A checkpoint in the middle of the first epoch."""
    runner = make_runner(folder, **{"custom_hooks": [SaveEvery({3})], **changes})
    runner.train()
    return folder / "iter_3"


def written(folder: Path, kind: str, state: State) -> Path:
    """The state in one of the forms that load_from takes."""
    if kind == "safetensors":
        save_file(state, folder / "weights.safetensors")
        return folder / "weights.safetensors"
    if kind == "directory":
        model = Net(len(state["net.0.bias"]))
        model.load_state_dict(state)
        runner = make_runner(folder / "run", model=model)
        _ = runner.model
        return Path(runner.save_checkpoint(folder, "saved"))
    content: Any = {"pth": state, "mmengine": {"meta": dict(epoch=3, note="x"), "state_dict": state}}[kind]
    torch.save(content, folder / "weights.pth")
    return folder / "weights.pth"


def loaded(folder: Path, path: Path, **options: Any) -> State:
    runner = make_runner(folder / "load", model=Net)
    runner.load_checkpoint(path, **options)
    return {name: tensor.clone() for name, tensor in runner.strategy.module.state_dict().items()}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


KINDS = ["directory", "pth", "mmengine", "safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_load_from(tmp_path: Path, kind: str) -> None:
    """The first forward of a run sees the weights, and training begins at the beginning."""
    path = written(tmp_path, kind, some_weights())
    seen: list[State] = []

    class Look(Hook):
        def before_train(self, runner: FlexibleRunner) -> None:
            seen.append({name: tensor.clone() for name, tensor in runner.strategy.module.state_dict().items()})
            assert (runner.epoch, runner.iter) == (0, 0)

    make_runner(tmp_path / "run2", load_from=str(path), custom_hooks=[Look()]).train()
    assert same(seen[0], some_weights())
    assert same(loaded(tmp_path, path, strict=True), some_weights())


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_of_what_was_loaded(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, some_weights())
    model = Net()
    model.load_state_dict(some_weights())
    right = model.eval()(None, Samples(10).x, Samples(10).y).argmax(1) == Samples(10).y
    parts = validation(10)
    runner = make_runner(
        tmp_path / "val", load_from=path, train_dataloader=None, train_cfg=None, optim_wrapper=None, **parts
    )
    assert runner.val()["accuracy"] == pytest.approx(100 * float(right.float().mean()))


@pytest.mark.parametrize("val_first", [True, False])
def test_weights_are_loaded_once(tmp_path: Path, val_first: bool) -> None:
    """Otherwise train() after val() would be fine, and train() after train() would start from the file again."""
    path = written(tmp_path, "pth", some_weights())
    runner = make_runner(tmp_path / "run", load_from=path, train_cfg=dict(max_epochs=1), **validation())
    if val_first:
        runner.val()
    runner.train()
    weights = {name: tensor.clone() for name, tensor in runner.strategy.module.state_dict().items()}
    runner.val()
    runner.train()
    assert same(dict(runner.strategy.module.state_dict()), weights)


@pytest.mark.parametrize("then", ["val", "train"])
def test_weights_loaded_by_hand_stay(tmp_path: Path, then: str) -> None:
    other, mine = some_weights(), {name: tensor + 1 for name, tensor in some_weights().items()}
    save_file(mine, tmp_path / "mine.safetensors")
    seen: list[State] = []

    class Look(Hook):
        def before_train(self, runner: FlexibleRunner) -> None:
            seen.append({name: tensor.clone() for name, tensor in runner.strategy.module.state_dict().items()})

        before_val = before_train

    load_from = written(tmp_path, "pth", other)
    runner = make_runner(tmp_path / "run", load_from=load_from, custom_hooks=[Look()], **validation())
    runner.load_checkpoint(tmp_path / "mine.safetensors")
    getattr(runner, then)()
    assert same(seen[0], mine)


def test_a_resumed_run_may_validate_first(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    whole = make_runner(tmp_path / "whole")
    whole.train()
    runner = make_runner(tmp_path / "rest", resume=str(path), **validation())
    runner.val()
    assert runner.iter == 0
    runner.train()
    assert runner.iter == 21
    assert same(dict(runner.strategy.module.state_dict()), dict(whole.strategy.module.state_dict()))


# Names that do not quite agree


def prefixed(state: State, prefix: str = "module.") -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_names_are_revised(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, prefixed(some_weights()))
    assert same(loaded(tmp_path, path, strict=True), some_weights())  # what DDP puts before names, by default
    path = written(tmp_path, kind, prefixed(some_weights(), "backbone."))
    with pytest.raises(CheckpointError, match=r"missing net.0.weight \(like backbone.net.0.weight\)"):
        loaded(tmp_path, path, strict=True)
    revised = loaded(tmp_path, path, strict=True, revise_keys=[(r"^backbone\.", "")])
    assert same(revised, some_weights())


def test_what_does_not_fit_is_left_out_unless_strict(tmp_path: Path) -> None:
    state = some_weights()
    state["net.0.weigth"] = state.pop("net.0.weight")
    state["net.3.bias"] = torch.zeros(5)
    path = written(tmp_path, "pth", state)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path, path, strict=True)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: does not fit the model: missing net.0.weight (like net.0.weigth)")
    assert "unexpected net.0.weigth (like net.0.weight)" in message
    assert "other shape net.3.bias (file (5,), model (2,))" in message
    found = loaded(tmp_path, path)
    assert torch.equal(found["net.0.bias"], some_weights()["net.0.bias"])
    assert found["net.3.bias"].shape == (2,)


class Tied(nn.Module):
    """The head and the embedding are one parameter, if they are tied."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, index: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.embed(x)), y)}


UNTIED = (
    "does not fit the model{}: head.weight has other values than embed.weight, and the model has one tensor for both"
)


def test_two_values_of_a_tied_parameter(tmp_path: Path) -> None:
    state = {name: torch.full((6, 6), value) for name, value in (("head.weight", 1.0), ("embed.weight", 2.0))}
    path = written(tmp_path, "pth", state)
    with refuses(CheckpointError, UNTIED.format("")):
        make_runner(tmp_path / "strict", model=Tied).load_checkpoint(path, strict=True)
    with log_lines() as lines:
        runner = make_runner(tmp_path / "load", model=Tied, log_level="WARNING")
        runner.load_checkpoint(path)
    assert lines == [f"{path}: {UNTIED.format(' everywhere')}"]
    assert set(runner.strategy.module.head.weight.flatten().tolist()) == {2.0}


def test_two_tensors_that_get_one_name(tmp_path: Path) -> None:
    state = some_weights()
    both = {f"student.{k}": v for k, v in state.items()} | {f"teacher.{k}": v + 1 for k, v in state.items()}
    path, revise_keys = written(tmp_path, "pth", both), [(r"^(student|teacher)\.", "")]
    said = "student.net.0.weight has other values than net.0.weight, and the model has one tensor for both"
    with pytest.raises(CheckpointError, match=said):
        loaded(tmp_path, path, strict=True, revise_keys=revise_keys)
    with log_lines() as lines:
        make_runner(tmp_path / "told", log_level="WARNING").load_checkpoint(path, revise_keys=revise_keys)
    assert any(said in line for line in lines)
    equal = written(tmp_path, "pth", {f"{name}.{k}": v for name in ("student", "teacher") for k, v in state.items()})
    assert same(loaded(tmp_path, equal, strict=True, revise_keys=revise_keys), state)


def said_of_ties(folder: Path, weights: Path, saved: Path) -> None:
    """In a worker: a tied parameter in shards, and a file whose second value of it differs in the last row alone."""
    sharded = dict(model=Tied, strategy=dict(type="FSDPStrategy", device="cpu"), log_level="WARNING")
    with make_runner(folder / "strict", **sharded) as runner, refuses(CheckpointError, UNTIED.format("")):
        runner.load_checkpoint(weights, strict=True)
    with make_runner(folder / "load", **sharded) as runner, log_lines() as lines:
        runner.load_checkpoint(weights)
        assert lines == ([f"{weights}: {UNTIED.format(' everywhere')}"] if dist.is_main() else [])
    rest = make_runner(folder / "rest", resume=str(saved), **sharded)
    with rest, refuses(CheckpointError, UNTIED.format("")):
        rest.train()


@pytest.mark.full
@pytest.mark.distributed
def test_two_values_of_a_tied_parameter_in_shards(tmp_path: Path, workers2: WorkerGroup) -> None:
    state = {name: torch.ones(6, 6) for name in ("head.weight", "embed.weight")}
    state["head.weight"][5] = 2.0  # which the second process holds
    saved = checkpoint(tmp_path, model=partial(Tied, tied=False))
    workers2.run(said_of_ties, tmp_path, written(tmp_path, "pth", state), saved)


def test_a_run_whose_head_was_trained_apart_is_not_resumed_with_a_tied_one(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, model=partial(Tied, tied=False))
    with refuses(CheckpointError, UNTIED.format("")):
        make_runner(tmp_path / "rest", resume=str(path), model=Tied).train()


def test_values_beyond_the_range_of_the_model_are_told(tmp_path: Path) -> None:
    state = some_weights()
    state["net.0.weight"][0, 0] = 1e6
    path = written(tmp_path, "pth", state)
    lines = []
    for model in (Net().half(), Net().bfloat16()):
        runner = make_runner(tmp_path / "load", model=model, log_level="WARNING")
        with log_lines() as said:
            runner.load_checkpoint(path)
        lines += [line for line in said if "beyond the range" in line]
    assert lines == [
        f"{path}: has values beyond the range of this model's parameters, 1 tensor (model.net.0.weight) holds NaN or infinity now"
    ]


def test_nothing_fits(tmp_path: Path) -> None:
    path = written(tmp_path, "pth", {"other": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="does not fit the model: missing"):
        loaded(tmp_path, path)


def test_a_file_that_executes_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"state_dict": some_weights(), "evil": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(
        CheckpointError, match=r"evil.pth: cannot be read as weights, it holds .*, and loading that would execute code"
    ):
        loaded(tmp_path, tmp_path / "evil.pth")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["broken.pth", "broken.safetensors"])
def test_a_file_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK not a file")
    with refuses(CheckpointError, matches=name):
        loaded(tmp_path, tmp_path / name)


# The averages of EMAHook belong to the weights


@pytest.mark.parametrize("call", ["val", "test"])
def test_load_from_takes_the_averages_too(tmp_path: Path, call: str) -> None:
    """A checkpoint is judged by the weights that it was chosen for."""

    class WeightSum(Net):
        def forward(self, index: Any, x: Tensor, y: Tensor, mode: str = "tensor") -> Any:
            if mode == "predict":
                total = sum(parameter.double().sum() for parameter in self.parameters())
                seen.append(float(total))
            return super().forward(index, x, y, mode)

    seen: list[float] = []
    changes: dict[str, Any] = dict(model=WeightSum, custom_hooks=[dict(type="EMAHook", momentum=0.05)], **validation(4))
    trained = make_runner(tmp_path, **changes, default_hooks=dict(checkpoint=dict(interval=1)))
    trained.train()
    in_training, own = seen[-1], float(sum(p.detach().double().sum() for p in trained.strategy.module.parameters()))
    assert in_training != own
    parts = {key.replace("val_", f"{call}_"): value for key, value in validation(4).items()}
    alone = {**changes, **dict.fromkeys(("train_dataloader", "optim_wrapper", "train_cfg")), **parts}
    getattr(make_runner(tmp_path / "judge", **alone, load_from=tmp_path / "epoch_3"), call)()
    assert seen[-1] == in_training
    without = {**alone, "custom_hooks": []}
    getattr(make_runner(tmp_path / "judge", **without, load_from=tmp_path / "epoch_3"), call)()
    assert seen[-1] == own


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(strict="yes"), "strict: 'yes' is not allowed, give True or False"),
        (dict(strict=1), "strict: 1 is not allowed"),
        (
            dict(revise_keys={"a": "b"}),
            "revise_keys: {'a': 'b'} is not allowed, give pairs of a pattern and its replacement",
        ),
        (dict(revise_keys="ab"), "revise_keys: 'ab' is not allowed, give pairs"),
        (dict(revise_keys=None), "revise_keys: None is not allowed, give pairs"),
        (dict(revise_keys=[("a", "b", "c")]), "revise_keys[0]: ('a', 'b', 'c') is not allowed, give pairs"),
        (dict(revise_keys=[("a", "b"), "ab"]), "revise_keys[1]: 'ab' is not allowed, give pairs"),
        (dict(revise_keys=[("a", 1)]), "revise_keys[0]: ('a', 1) is not allowed, give pairs"),
        (dict(revise_keys=[("(", "")]), "revise_keys[0]: ('(', '') is not allowed, missing )"),
        (dict(revise_keys=[("never in a name", r"\2")]), "is not allowed, invalid group reference 2"),
        (dict(revise_keys=[["a", r"\g<x>"]]), "is not allowed, unknown group name 'x'"),
    ],
)
def test_wrong_options_of_loading_are_found_before_anything_is_read(tmp_path: Path, options: Any, says: str) -> None:
    runner = make_runner(tmp_path)
    with refuses(ConfigError, says):
        runner.load_checkpoint(tmp_path / "nowhere.pth", **options)


@pytest.mark.parametrize("key, value", [("strict", True), ("revise_keys", [])])
def test_options_of_loading_are_no_arguments_of_a_runner(tmp_path: Path, key: str, value: Any) -> None:
    for make in (make_runner, lambda folder, **given: FlexibleRunner.from_cfg(configuration(folder, **given))):
        with pytest.raises(ConfigError, match=f"^{key}: unknown key, call runner.load_checkpoint"):
            make(tmp_path, **{key: value})


# Checkpoints that cannot be resumed


def without(*keys: Any) -> Any:
    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values[key]
        del values[keys[-1]]

    return change


def with_value(value: Any, *keys: Any) -> Any:
    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change, says",
    [
        (without("loop"), "cannot be resumed, it has no loop; load_from takes its weights alone"),
        (without("rng"), "cannot be resumed, it has no rng"),
        (without("data"), "cannot be resumed, it has no data"),
        (without("message_hub"), "cannot be resumed, it has no message_hub"),
        (without("own_losses"), "cannot be resumed, it has no own_losses"),
        (without("optim.wrapper"), "cannot be resumed, it has no optim.wrapper"),
        (without("scheduler"), "cannot be resumed, it has no scheduler"),
        (with_value([], "rng"), "was written with 1 data shard and has RNG states of 0"),
        (with_value("x", "rng"), "rng is damaged"),
        (with_value("AAAA", "rng", 0, "torch"), "rng is damaged"),
        (without("rng", 0, "numpy"), "rng is damaged, KeyError"),
        (without("loop", "inner"), "loop is damaged, KeyError: 'inner'"),
        (without("loop", "iter"), "loop is damaged, KeyError"),
        (with_value({}, "message_hub"), "message_hub is damaged"),
        (with_value([[0.5] * 200], "own_losses"), "message_hub is damaged"),
        (with_value(None, "data"), "data is damaged"),
        (without("scheduler", "", 0, "last_step"), "saved by another kind of scheduler"),
        (with_value({"scaler": {"scale": 2.0}}, "optim.wrapper"), "optim is damaged"),
        (with_value("Adam", "optim.group.net.0.weight.optimizer"), "the checkpoint's is Adam"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_or_broken_piece_raises(tmp_path: Path, change: Any, says: str) -> None:
    changes = dict(
        optim_wrapper=dict(type="AmpOptimWrapper", optimizer=SGD, dtype="float16"),
        param_scheduler=dict(type="LinearLR", by_epoch=False),
    )
    path = checkpoint(tmp_path, **changes)
    change_values(path, change)
    runner = make_runner(tmp_path / "rest", resume=str(path), **changes)
    with refuses(CheckpointError, says):
        runner.train()


class Remembers(Hook):
    """A hook with a state of plain values and tensors, and something of its own in the checkpoint."""

    def __init__(self) -> None:
        self.count, self.table, self.seen = 0, torch.zeros(3), None

    def after_train_iter(
        self, runner: FlexibleRunner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.count += 1
        self.table[self.count % 3] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "nested": {"table": self.table, "note": "x"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.table = state["nested"]["table"].clone()

    def before_save_checkpoint(self, runner: FlexibleRunner, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"iter": self.count, "values": torch.arange(self.count)}

    def after_load_checkpoint(self, runner: FlexibleRunner, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["mine"]


def test_states_of_hooks(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, custom_hooks=[Remembers(), Remembers(), SaveEvery({3})])
    first, second = Remembers(), Remembers()
    make_runner(tmp_path / "rest", resume=str(path), custom_hooks=[first, second]).train()
    assert (first.count, second.count) == (21, 21)
    assert first.table.tolist() == second.table.tolist() == [7.0, 7.0, 7.0]
    assert first.seen["iter"] == 3
    assert torch.equal(first.seen["values"], torch.arange(3))


def test_a_broken_state_of_a_hook(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, custom_hooks=[Remembers(), SaveEvery({3})])
    change_values(path, without("hook.Remembers/count"))
    runner = make_runner(tmp_path / "rest", resume=str(path), custom_hooks=[Remembers()])
    with pytest.raises(CheckpointError, match=r"has no hook.Remembers/count; resume=dict\(hooks=False\) leaves it out"):
        runner.train()


def test_a_hook_that_is_new_starts_afresh(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    new = Remembers()
    new.after_load_checkpoint = lambda runner, checkpoint: None  # type: ignore[method-assign]
    make_runner(tmp_path / "rest", resume=str(path), custom_hooks=[new]).train()
    assert new.count == 18


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(model=lambda: Net(9)), "does not fit the model: other shape net.0.weight (file (8, 6), model (9, 6))"),
        (dict(model=lambda: nn.Sequential(nn.Linear(6, 2))), "does not fit the model: missing"),
        (dict(optim_wrapper=dict(optimizer=dict(type="Adam"))), "the checkpoint's is SGD, the configuration's is Adam"),
        (
            dict(train_dataloader=dict(batch_size=4, dataset=Samples(26), shuffle=False, collate_fn="default_collate")),
            "was saved in the middle of an epoch with shuffle=True, it is False now",
        ),
    ],
    ids=["shape", "names", "optimizer", "order"],
)
def test_a_checkpoint_of_another_run(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = checkpoint(tmp_path)
    with refuses(CheckpointError, says):
        make_runner(tmp_path / "rest", resume=str(path), **changes).train()


def test_at_the_end_of_an_epoch_the_data_may_change(tmp_path: Path) -> None:
    make_runner(tmp_path, default_hooks=dict(checkpoint=dict(interval=1))).train()
    loader = DataLoader(Samples(40), batch_size=5, shuffle=True)
    runner = make_runner(tmp_path / "rest", resume=str(tmp_path / "epoch_1"), train_dataloader=loader)
    runner.train()
    assert (runner.epoch, runner.iter) == (3, 7 + 2 * 8)


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    hooks = dict(checkpoint=dict(interval=1, save_optimizer=False))
    make_runner(tmp_path, default_hooks=hooks, train_cfg=dict(max_epochs=1)).train()
    assert not (tmp_path / "latest").exists()
    with pytest.raises(
        CheckpointError,
        match=r"cannot be resumed, it has no optim.wrapper; resume=dict\(optimizer=False\) leaves it out",
    ):
        make_runner(tmp_path / "rest", resume=str(tmp_path / "epoch_1")).train()
    make_runner(tmp_path / "rest", load_from=str(tmp_path / "epoch_1")).train()


@pytest.mark.parametrize("pointer", ["epoch_7", "../elsewhere", None])
def test_the_newest_complete_one_is_resumed_where_latest_is_wrong(tmp_path: Path, pointer: str | None) -> None:
    saves = dict(default_hooks=dict(checkpoint=dict(save_best="accuracy")), log_level="WARNING", **validation())
    make_runner(tmp_path, **saves).train()
    (tmp_path / "epoch_3" / "manifest.json").unlink()
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    runner = make_runner(tmp_path, resume=True, **saves)
    runner.train()
    assert runner.train_loop.start_iter == 2 * 7
    log = (Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert f"{tmp_path / 'latest'}: " in log
    assert log.count("epoch_2 is resumed, the newest complete checkpoint there") == 1
    assert "write the name" not in log


def test_latest_that_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("epoch_7")
    with pytest.raises(CheckpointError, match=r'latest: names "epoch_7", which is not a complete checkpoint'):
        make_runner(tmp_path, resume=True).train()


@pytest.mark.parametrize("kind", ["int8", "bool", "float8"])
def test_quantised_weights_are_refused(tmp_path: Path, kind: str) -> None:
    """Their numbers mean something else: int8 of a file were loaded as they stand."""
    state, name = some_weights(), "net.0.weight"
    if kind == "float8":
        state[name] = state[name].to(torch.float8_e4m3fn)
        path = written(tmp_path, "pth", state)
        assert torch.equal(loaded(tmp_path, path)[name], state[name].float())  # without a scale they mean what they are
        state[f"{name}_scale_inv"] = torch.ones(1, 1)
    else:
        state[name] = (state[name] * 50).to(getattr(torch, kind))
    path = written(tmp_path, "pth", state)
    what = "float8_e4m3fn with a scale" if kind == "float8" else kind
    with refuses(
        CheckpointError,
        exactly=f"{path}: {name} is {what}, and float32 in the model; quantised weights are not read, give those from before the "
        "quantisation",
    ):
        loaded(tmp_path, path)
