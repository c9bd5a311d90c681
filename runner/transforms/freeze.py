"""Freeze: parameters that are not trained, chosen by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...core.errors import ConfigError
from ...core.registry import TRANSFORMS
from .patterns import compiled, matching


@TRANSFORMS.register_module()
class Freeze:
    """Freezes the parameters whose name, or the name of a module around them, matches a pattern.

    Args:
        patterns: a pattern of names or several, as ``"backbone"``, ``"model.layers.[01]"`` or ``"*.bias"``; each has to match.
        but: patterns of parameters to leave as they are; each has to match one that ``patterns`` has chosen.
        regex: True: these are regular expressions for whole names; False: globs.

    Raises:
        ConfigError: a pattern is invalid, or matches nothing.

    Example:
        transforms=[dict(type="Freeze", patterns=["backbone"], but=["*.bias"])]
    """

    def __init__(
        self,
        patterns: str | Sequence[str],
        but: str | Sequence[str] | None = None,
        regex: bool = False,
        *,
        where: str = "Freeze",
    ) -> None:
        if not isinstance(regex, bool):
            raise ConfigError(f"{where}.regex: {regex!r} is not allowed, give True or False")
        self._where = where
        self._patterns = compiled(patterns, f"{where}.patterns", regex=regex)
        self._but = [] if but is None else compiled(but, f"{where}.but", regex=regex)

    def __call__(self, module: nn.Module) -> None:
        """Freeze them."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        chosen = matching(self._patterns, list(parameters), f"{self._where}.patterns")
        kept = matching(self._but, sorted(chosen), f"{self._where}.but")
        if chosen == kept:
            raise ConfigError(f"{self._where}.but: leaves out all that patterns match, nothing is frozen")
        for name in chosen - kept:
            parameters[name].requires_grad_(False)
