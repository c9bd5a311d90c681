"""Checks of a strategy's canonical state: its keys, and that training continues from it under another strategy."""

from __future__ import annotations

import torch
from torch import Tensor

from .check_table import StrategyUnderTest, check
from .checks_training import adamw, batches, one_each
from .differences import require, same_keys, same_numbers, same_tensors
from .loop import learning_rates
from .models import ConformanceNet
from .sessions import Session, load, run, save, whole_model, whole_state

BEFORE = 3  # updates before the checkpoint
AFTER = 4


@check("the state has single-device's keys, shapes and dtypes, before the first update and after")
def state_keys(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(2))
    with tested.reference(adamw()) as single:
        expected = [whole_state(single.strategy)]
        run(single, windows)
        expected.append(whole_state(single.strategy))
    with tested.session(adamw()) as session:
        found = [whole_state(session.strategy)]
        run(session, windows)
        found.append(whole_state(session.strategy))
    for ours, theirs, moment in zip(found, expected, ("before the first update", "after 2 updates"), strict=True):
        same_keys(ours, theirs, f"state {moment}")
        for key, value in theirs.items():
            if isinstance(value, Tensor):
                ours_is, theirs_is = _kind(ours[key]), _kind(value)
                require(ours_is == theirs_is, f"state {moment}: {key} is {ours_is}, single-device's is {theirs_is}")
            else:
                require(ours[key] == value, f"state {moment}: {key} is {ours[key]!r}, single-device's is {value!r}")


def _kind(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


@check("training from a single device's checkpoint continues under the strategy as on that device")
def resume_from_single(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(BEFORE + AFTER))
    path = tested.folder / "single"
    with tested.reference(adamw()) as single:
        run(single, windows[:BEFORE])
        if tested.rank == 0:
            save(single, path)
        expected = _continue(single, windows)
        state = whole_state(single.strategy)
    with tested.session(adamw()) as session:
        run(session, windows[AFTER:])  # other updates first, so that everything must come from the checkpoint
        load(session, path)
        _compare(tested, session, _continue(session, windows), expected, state)


@check("training from the strategy's checkpoint continues on a single device as it would have without the strategy")
def resume_to_single(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(BEFORE + AFTER))
    path = tested.folder / "strategy"
    with tested.session(adamw()) as session:
        run(session, windows[:BEFORE])
        save(session, path)
    with tested.reference(adamw()) as single:
        run(single, windows[:BEFORE])
        expected = _continue(single, windows)
        state = whole_state(single.strategy)
    with tested.reference(adamw()) as single:
        load(single, path)
        _compare(tested, single, _continue(single, windows), expected, state)


@check(
    "training from the strategy's own checkpoint continues as without interruption: bit for bit on up to two processes"
)
def resume_itself(tested: StrategyUnderTest) -> None:
    windows = one_each(batches(BEFORE + AFTER))
    path = tested.folder / "itself"
    with tested.session(adamw()) as session:
        run(session, windows[:BEFORE])
        save(session, path)
        expected = _continue(session, windows)
        state = whole_state(session.strategy)
    with tested.session(adamw()) as session:
        load(session, path)
        # A sum over three processes depends on the order, which may change between the first calls of a back end.
        tolerance = 0.0 if tested.world_size <= 2 else tested.tolerance
        same_numbers(_continue(session, windows), expected, "after resuming, the loss", tolerance)
        same_tensors(whole_state(session.strategy), state, "state at the end", tolerance)


@check("full_weights gives a model with whole weights that computes alone, and does not change the following updates")
def full_weights(tested: StrategyUnderTest) -> None:
    windows, held_out = one_each(batches(4)), batches(1, seed=5)[0]
    with tested.session(adamw()) as session:
        undisturbed = run(session, windows)
    with tested.session(adamw()) as session:
        strategy = session.strategy
        run(session, windows[:2])
        expected = whole_model(strategy)
        training = session.model.training
        with strategy.full_weights() as model, torch.no_grad():
            require(
                isinstance(model, ConformanceNet), f"full_weights gave a {type(model).__name__}, not the user's model"
            )
            found = {f"model.{name}": tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
            kinds = {type(tensor) for tensor in (*model.parameters(), *model.buffers())}
            require(kinds <= {Tensor, torch.nn.Parameter}, f"full_weights gave tensors of {sorted(map(str, kinds))}")
            model.eval()
            outputs = []
            for _ in range(1 + strategy.rank):  # unequally often: no call may wait for another process
                with strategy.autocast():
                    outputs.append(model(**_on(held_out, strategy.device), mode="tensor").cpu())
        require(
            session.model.training == training, "full_weights left the model in another mode, training or evaluation"
        )
        last = run(session, windows[2:])
    single = ConformanceNet()
    single.load_state_dict({key.removeprefix("model."): value for key, value in expected.items()}, strict=False)
    with torch.no_grad():
        reference = single.eval()(**held_out, mode="tensor")
    same_tensors({key: found[key] for key in expected}, expected, "weights in full_weights", tested.tolerance)
    for output in outputs:
        same_tensors(
            {"logits": output}, {"logits": reference}, "outputs of the model with whole weights", tested.tolerance
        )
    same_tensors(last.weights[-1], undisturbed.weights[-1], "final weights with and without full_weights")


def _on(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _continue(session: Session, windows: list) -> list[float]:  # type: ignore[type-arg]
    return run(session, windows[BEFORE:]).trace.losses


def _compare(
    tested: StrategyUnderTest, session: Session, found: list[float], expected: list[float], state: dict[str, object]
) -> None:
    same_numbers(found, expected, "after resuming, the loss", tested.tolerance)
    same_tensors(whole_state(session.strategy), state, "state at the end of the resumed training", tested.tolerance)
    require(bool(learning_rates(session.optim)), "no parameter group is left after resuming")
