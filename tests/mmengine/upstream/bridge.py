"""What the translated tests import: MMEngine's module tree with flextrain's names in it, and a recorder of results.

``import mmx.hooks`` gives for each name of ``mmengine.hooks`` what docs/mmengine.md says is its counterpart. MMEngine's data
classes, configuration and utilities are MMEngine's own, as the page says. A name without a counterpart raises when it is used.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import page

import flextrain
from flextrain import optim as flextrain_optim
from flextrain.core.base.errors import FlexTrainError
from flextrain.core.checkpoint import Checkpoint
from flextrain.core.comm.topology import Topology  # noqa: F401
from flextrain.runner.hooks import DEFAULT_HOOKS  # noqa: F401
from flextrain.runner.reporting import close_logger  # noqa: F401

KEPT = ("config", "device", "dist", "fileio", "structures", "testing", "utils")
"""Modules of MMEngine that do not depend on a runner."""
KEPT_NAMES = ("BaseDataset", "Compose", "force_full_init")
HOMES = ("flextrain", "flextrain.optim", "flextrain.optim.schedulers", "flextrain.runner", "flextrain.runner.hooks")
"""Where names are that MMEngine has without making them public."""
ROWS = {row.name: row for module in page.MODULES for row in page.rows(f"mmengine.{module}")}


class Missing(type):
    """A name that flextrain does not have: it can be imported, and raises when it is used."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NameError(f"flextrain has no {cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NameError(f"flextrain has no {cls.__name__}.{name}")

    def __iter__(cls) -> Any:
        raise NameError(f"flextrain has no {cls.__name__}")


class MMLogger:
    """flextrain logs to one logger of the standard library."""

    @staticmethod
    def get_current_instance() -> logging.Logger:
        return logging.getLogger("flextrain")

    @staticmethod
    def get_instance(name: str, **_: Any) -> logging.Logger:
        return logging.getLogger("flextrain")


def is_installed(package: str) -> bool:
    """MMEngine's asks pkg_resources, which new versions of setuptools have no more."""
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def find(module: str, name: str) -> Any:
    """The counterpart of ``name`` of ``mmengine.<module>``."""
    if name in OWN:
        return OWN[name]
    if module.split(".")[0] not in KEPT and (row := ROWS.get(name)) and row.state in ("same", "differs"):
        return page.find(row)
    if module.split(".")[0] in KEPT or name in KEPT_NAMES:
        return getattr(importlib.import_module(f"mmengine.{module}"), name)
    for home in HOMES:
        if hasattr(importlib.import_module(home), name):
            return getattr(importlib.import_module(home), name)
    if name.isupper() and "registry" in module:  # the page says: Registry(...) makes one of your own
        OWN[name] = flextrain.Registry(name.lower())
        return OWN[name]
    return Missing(name, (), {})


def _config() -> Any:
    """A configuration is a dict here; MMEngine's ConfigDict is one, and Config is not."""
    return importlib.import_module("mmengine.config").ConfigDict


OWN: dict[str, Any] = {"Config": _config(), "MMLogger": MMLogger, "is_installed": is_installed}


def _is_module(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if _is_module(f"mmengine{self.__name__[3:]}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        found = find(self.__name__[4:], name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "mmx" and not name.startswith("mmx."):
            return None
        if not _is_module(f"mmengine{name[3:]}"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []
        if module.__name__ == "mmx.testing.runner_test_case":
            source = Path(os.environ["FLEXTRAIN_UPSTREAM"]) / "runner_test_case.py"
            exec(compile(source.read_text(), source, "exec"), module.__dict__)
        if module.__name__ == "mmx.testing":
            module.RunnerTestCase = importlib.import_module("mmx.testing.runner_test_case").RunnerTestCase


sys.meta_path.insert(0, _Finder())


# Errors: MMEngine raises AssertionError, TypeError, ... with its own words; flextrain raises its own errors with others.

OTHERS = (AssertionError, TypeError, ValueError, KeyError, RuntimeError, NotImplementedError, FileNotFoundError)


def _wider(kinds: Any) -> Any:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return (*kinds, FlexTrainError) if any(issubclass(kind, OTHERS) for kind in kinds) else kinds


def _raises(self: unittest.TestCase, kind: Any, *args: Any, **kwargs: Any) -> Any:
    return ASSERT_RAISES(self, _wider(kind), *args, **kwargs)


@contextlib.contextmanager
def _with_words(kind: Any, regex: Any) -> Iterator[None]:
    """Errors of flextrain have other words; those of other kinds must have MMEngine's."""
    try:
        yield
    except FlexTrainError:
        return
    except kind as error:
        if regex is not None and not re.search(regex, str(error)):
            raise AssertionError(f"{regex!r} is not in {str(error)!r}") from error
        return
    raise AssertionError(f"{kind} is not raised")


def _raises_regex(self: unittest.TestCase, kind: Any, regex: Any, *args: Any, **kwargs: Any) -> Any:
    if not args:
        return _with_words(kind, regex)
    with _with_words(kind, regex):
        return args[0](*args[1:], **kwargs)


def _pytest_raises(kind: Any, *args: Any, match: Any = None, **kwargs: Any) -> Any:
    return PYTEST_RAISES(kind, *args, **kwargs) if args else _with_words(kind, match)


ASSERT_RAISES, PYTEST_RAISES = unittest.TestCase.assertRaises, pytest.raises
unittest.TestCase.assertRaises = _raises  # type: ignore[method-assign, assignment]
unittest.TestCase.assertRaisesRegex = _raises_regex  # type: ignore[method-assign, assignment]
pytest.raises = _pytest_raises  # type: ignore[assignment]


# What the rules put in the place of calls that have another form here


def momentum(group: dict[str, Any], key: str = "momentum") -> Any:
    """MMEngine adds ``momentum`` to a group of Adam; here ``betas`` itself changes."""
    return group["betas"][0] if key == "momentum" and "momentum" not in group else group[key]


def watched(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with two methods that note their calls; MMEngine's tests take a mock, whose class is no optimizer."""
    optimizer.step = MagicMock(wraps=optimizer.step)  # type: ignore[method-assign]
    optimizer.zero_grad = MagicMock(wraps=optimizer.zero_grad)  # type: ignore[method-assign]
    return optimizer


class Constructed:
    """The OptimWrapper that a constructor's configuration gives for a model, with one group per parameter.

    Here parameters with equal settings share a group. MMEngine's tests look at the settings of each parameter.
    """

    def __init__(self, constructor: Any, model: nn.Module) -> None:
        given = constructor.paramwise_cfg.unnoted()
        cfg = {**constructor.optim_wrapper_cfg, "optimizer": constructor.optimizer_cfg, "paramwise_cfg": given}
        self._wrapper = flextrain_optim.build_optim_wrapper(dict(cfg, constructor=type(constructor)))
        self._wrapper.build(model)
        self.optimizer: Any = self._wrapper.optimizer
        if given:
            groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
            each = [dict(groups[id(p)], params=[p]) for p in model.parameters() if id(p) in groups]
            self.optimizer = copy.copy(self.optimizer)
            self.optimizer.param_groups = each

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)


def build_optim_wrapper(model: nn.Module, cfg: Any) -> Any:
    """MMEngine's gives the model to the constructor; here the strategy builds the optimizer."""
    wrapper = flextrain_optim.build_optim_wrapper(cfg)
    wrapper.build(model)
    return wrapper


def fill(hub: Any, mode: str, scalars: dict[str, Any], infos: dict[str, Any] | None = None) -> None:
    """Put figures where a log processor finds them."""
    for name, value in scalars.items():
        hub.update_scalar(f"{mode}/{name}", value)
    for name, value in (infos or {}).items():
        hub.update_info(f"{mode}/{name}", value)


def mock_runner() -> Any:
    """A mock with what hooks and log processors ask of a runner."""
    runner = MagicMock()
    runner.strategy.device = torch.device("cpu")
    runner.logger = logging.getLogger("flextrain")
    runner.max_epochs, runner.rank = 1000, 0
    for mode, length in (("train", 20), ("val", 10), ("test", 5)):
        loop = getattr(runner, f"{mode}_loop")
        loop.epoch_length = loop.num_batches = length
    return runner


def early_stopping(**arguments: Any) -> Any:
    """An EarlyStoppingHook in training; other validations than those of training do not count."""
    hook = find("hooks", "EarlyStoppingHook")(**arguments)
    hook.before_train(mock_runner())
    return hook


AFTER_AN_UPDATE = types.SimpleNamespace(last_step=types.SimpleNamespace(skipped=False))
"""What a scheduler finds in its optimizer wrapper after an update."""


class Averages:
    """The averages of an EMAHook, where MMEngine has a model with them."""

    def __init__(self, hook: Any, runner: Any, at: dict[str, Any] | None = None) -> None:
        self.hook, self.runner, self.at = hook, runner, at

    def state_dict(self) -> dict[str, Any]:
        """Averages by name, ``module.`` before it as in MMEngine."""
        found = self.hook.state_dict() if self.at is None else self.at
        return {n.replace("averaged.", "module."): t for n, t in found.items() if n.startswith("averaged.")}

    def parameters(self) -> list[Any]:
        """Averages in the order of the model's parameters."""
        averages = self.state_dict()
        return [averages[f"module.{name}"] for name, _ in self.runner.model.named_parameters()]

    def __deepcopy__(self, _: Any) -> Averages:
        return Averages(self.hook, self.runner, copy.deepcopy(self.hook.state_dict()))


def merged_in_test(runner: Any) -> Any:
    """The BaseTTAModel with which ``runner.test()`` made its predictions; afterwards there is none."""
    seen = []

    class See(flextrain.Hook):
        def after_test_iter(self, runner: Any, *_: Any, **__: Any) -> None:
            seen.append(runner.stepper.merging)

    runner.register_hook(See())
    runner.test()
    assert runner.stepper.merging is None
    return seen[0]


def check_swap(hook: Any, runner: Any, name: str, own: nn.Module, averages: Averages) -> None:
    """The model has the averages after ``before_...``, and its own weights after ``after_...``, bit for bit."""

    def holds(expected: Any) -> bool:
        return all(torch.equal(a, b) for a, b in zip(runner.model.parameters(), expected.parameters(), strict=True))

    getattr(hook, name.replace("after", "before"))(runner)
    assert holds(averages)
    assert not holds(own)
    getattr(hook, name.replace("before", "after"))(runner)
    assert holds(own)
    assert all(map(torch.equal, averages.parameters(), Averages(hook, runner).parameters()))


def best_of(checkpoint: dict[str, Any]) -> str:
    """What the hook's state in the best checkpoint says of it."""
    return json.dumps(checkpoint["hooks"]["CheckpointHook/best"])


def read_checkpoint(path: Any, **_: Any) -> dict[str, Any]:
    """What a checkpoint holds under the keys of MMEngine's files, where tests read them with torch.load."""
    found = Checkpoint.open(path)
    tensors = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in found.tensors.items()}
    found.load(tensors)
    values = found.values
    whole = {"meta": values["meta"], "message_hub": values["message_hub"]}
    whole["state_dict"] = {k.removeprefix("model."): tensor for k, tensor in tensors.items() if k.startswith("model.")}
    if any(key.startswith("optim.") for key in (*values, *tensors)):
        whole["optimizer"] = {key: value for key, value in values.items() if key.startswith("optim.")}
    if "scheduler" in values:
        whole["param_schedulers"] = values["scheduler"].get("", values["scheduler"])
    averages = "hook.EMAHook/averaged."
    if any(key.startswith(averages) for key in tensors):
        found_averages = {k.replace(averages, "module."): t for k, t in tensors.items() if k.startswith(averages)}
        whole["ema_state_dict"] = {"steps": values["hook.EMAHook/updates"], **found_averages}
    whole["hooks"] = {key.removeprefix("hook."): v for key, v in values.items() if key.startswith("hook.")}
    return whole


def profile_once(hook: Any, runner: Any) -> None:
    """Record and stop, which calls what is to be done with a trace."""
    hook.before_train(runner)
    hook.after_train_iter(runner, 0)
    hook.after_train(runner)


# Results


LOG = Path(os.environ["FLEXTRAIN_UPSTREAM"]) / "results.jsonl" if "FLEXTRAIN_UPSTREAM" in os.environ else None


def pytest_runtest_logreport(report: Any) -> None:
    if LOG is None or (report.when != "call" and report.outcome == "passed"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = "" if report.outcome == "passed" else crash.message if crash else str(report.longrepr)[-300:]
    with LOG.open("a") as file:
        print(json.dumps([report.nodeid, report.outcome, why]), file=file)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError("longer than a minute")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


torch.set_num_threads(1)
