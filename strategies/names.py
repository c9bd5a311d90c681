"""Names: parameter and buffer names of the whole model, their aliases, and which process holds and saves each."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import nn

from ..core.comm.agreement import gather_differing
from ..core.model.module_state import extra_aliases, keepers, tensor_names, torch_key


class Names:
    """The names of a model, of which a process may hold only some after the strategy has wrapped it.

    Names are those in the model as it was built. A tied parameter has the first of its names, also on a process that
    holds it only under another name, such as the last stage of a pipeline.

    Args:
        model: the model as it was built, equal on every process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._aliases = {**tied(model), **extra_aliases(model)}
        self._all = tensor_names(model)
        self._keepers = frozenset(name for name, _ in keepers(model))
        self._owners: dict[str, int] = {}

    def gather(self, module: nn.Module) -> None:
        """Exchange which process holds which name; a collective, called after the model was wrapped."""
        own = sorted({*(name for name, _ in module.named_buffers()), *(_part(m, n) for n, m in module.named_modules())})
        everyones = gather_differing(own)
        if all(names == own for names in everyones):
            return  # rank 0 has everything
        for rank, names in enumerate(everyones):
            for name in names:
                self._owners.setdefault(name, rank)

    def owner(self, name: str, module: nn.Module, own: int) -> int:
        """Return the first rank that holds the buffer or submodule ``name`` of ``module``.

        Args:
            own: this process's rank, returned for modules that were added later.
        """
        if name in self._owners or not self._owners:
            return self._owners.get(name, 0)
        while name:  # a buffer added during training belongs to its module's owner
            try:
                return self._owners.get(_part(module.get_submodule(name), name), own)
            except AttributeError:
                name = name.rpartition(".")[0]
        return self._owners.get(_part(module, ""), own)

    def parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters with their names in the model."""
        if not self._aliases:
            yield from module.named_parameters()
            return
        own = dict(module.named_parameters())
        for name, parameter in own.items():
            yield self._first(name, own), parameter

    def aliases(self, module: nn.Module) -> dict[str, str]:
        """Return further names of tied parameters and modules with extra state, on any process, each with its first."""
        now = {**tied(module), **extra_aliases(module)}
        if not self._aliases:
            return now
        held = dict(module.named_parameters(remove_duplicate=False))
        names = {*held, *(torch_key(name) for name, _ in keepers(module, every_name=True))}
        elsewhere = {alias: name for alias, name in self._aliases.items() if not {alias, name} <= names}
        return {**elsewhere, **{alias: self._first(name, names) for alias, name in now.items()}}

    def elsewhere(self, module: nn.Module) -> frozenset[str]:
        """Return the names of parameters and persistent buffers that only other processes hold."""
        return self._all - tensor_names(module) - {name for name, _ in self.parameters(module)}

    def keepers_elsewhere(self, module: nn.Module) -> frozenset[str]:
        """Return the names of modules with extra state that only other processes hold."""
        return self._keepers - {name for name, _ in keepers(module, every_name=True)}

    def _first(self, name: str, held: Container[str]) -> str:
        first = self._aliases.get(name, name)
        return name if first in held else first


def tied(model: nn.Module) -> dict[str, str]:
    """Return further names of tied parameters, each with its first."""
    first: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _part(module: nn.Module, name: str) -> str:
    """Return a module's name and class; a placeholder for another process's module differs by its class."""
    return f"{name}: {type(module).__name__}"
