"""MMEngine's LogProcessors as LogProcessors of flextrain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine.registry import LOG_PROCESSORS
from mmengine.runner import LogProcessor as Theirs

from ..core.config import check_call
from ..runner.reporting import LogProcessor
from ..runner.reporting.message_hub import AVERAGED
from .registries import factory, found_in_scope, is_mmengines, without


class AdaptedLogProcessor(LogProcessor):
    """Lets a project's LogProcessor make log lines and records, from the scalars of the run.

    Args:
        theirs: the LogProcessor.
    """

    def __init__(self, theirs: Theirs) -> None:
        super().__init__(
            window_size=theirs.window_size,
            by_epoch=theirs.by_epoch,
            num_digits=theirs.num_digits,
            log_with_hierarchy=theirs.log_with_hierarchy,
        )
        self.theirs = theirs

    def get_log_after_iter(self, runner: Any, batch_idx: int, mode: Any) -> tuple[dict[str, Any], str]:
        """See LogProcessor."""
        runner.message_hub.fetch(f"{mode}/", reduce=AVERAGED if mode == "train" else None)
        record, line = self.theirs.get_log_after_iter(runner, batch_idx, mode)
        return dict(record), line

    def get_log_after_epoch(
        self, runner: Any, batch_idx: int, mode: Any, with_non_scalar: bool = False
    ) -> tuple[dict[str, Any], str]:
        """See LogProcessor."""
        record, line = self.theirs.get_log_after_epoch(runner, batch_idx, mode, with_non_scalar)
        return dict(record), line


def adapted_log_processor(cfg: Any, where: str) -> Any:
    """``log_processor`` for flextrain's runner, whose own takes the place of MMEngine's."""
    if isinstance(cfg, Theirs):
        return AdaptedLogProcessor(cfg)
    if not isinstance(cfg, Mapping) or "type" not in cfg:
        return cfg
    found = found_in_scope(cfg, LOG_PROCESSORS)
    if not (isinstance(found, type) and issubclass(found, Theirs)):
        return without(cfg)
    arguments = without(cfg, "type")
    if is_mmengines(found):
        return arguments
    check_call(factory(found), arguments, where)
    return AdaptedLogProcessor(found(**arguments))
