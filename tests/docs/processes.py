"""New processes for the code of a page: forked from one that has imported torch and runs no code of users itself."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import pickle
import runpy
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from flextrain.testing.workers import _free_port

from .keywords import check, check_keywords
from .pages import ROOT, Block


@dataclass(frozen=True)
class Ended:
    """What a process has printed, and its exit status."""

    output: str
    status: int


def forked(functions: list[Callable[[], object]], folder: Path, variables: dict[str, str]) -> Ended:
    """Run each function in a process of its own, at the same time; with several they have torchrun's variables."""
    count, port = len(functions), _free_port()
    with tempfile.TemporaryFile() as out:
        children = []
        for rank, function in enumerate(functions):
            ranks = _torchrun(rank, count, port) if count > 1 else {}
            if not (child := os.fork()):
                _be(function, folder, {**variables, **ranks}, out.fileno())
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        out.seek(0)
        return Ended(out.read().decode(errors="replace"), next((status for status in statuses if status), 0))


def _torchrun(rank: int, count: int, port: int) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in ranks.items()}}


def _be(function: Callable[[], object], folder: Path, variables: dict[str, str], out: int) -> None:
    """Become the process of ``function``, and end with it."""
    status = 1
    try:
        _begin(folder, variables, out)
        function()
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _begin(folder: Path, variables: dict[str, str], out: int) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)  # its pool is gone with the fork, and made anew by one thread, before there are several
    # Examples and tests are named as in the repository, and not found as modules.
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    os.dup2(out, 1)
    os.dup2(out, 2)


def script(path: str, flags: list[str]) -> Callable[[], object]:
    """What ``python path flags`` does."""

    def run() -> None:
        sys.argv = [path, *flags]
        sys.path.insert(0, str(Path(path).parent.absolute()))
        runpy.run_path(path, run_name="__main__")

    return run


def command(flags: list[str]) -> Callable[[], object]:
    """What ``flextrain flags`` does."""

    def run() -> None:
        from flextrain.cli import main

        sys.argv = ["flextrain", *flags]
        sys.exit(main(flags))

    return run


class Interpreter:
    """A process in which the Python blocks of a page run one after the other, in one namespace."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = Pipe()
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        if not (child := os.fork()):
            self._ours.close()
            _be(lambda: _interpret(theirs), folder, {}, self._out.fileno())
        self._child = child
        theirs.close()

    def run(self, block: Block) -> tuple[str, str, str]:
        """What the block printed, the name of what it raised, and that with its traceback."""
        start = self._out.seek(0, os.SEEK_END)
        self._ours.send_bytes(pickle.dumps(block))
        try:
            raised, text = pickle.loads(self._ours.recv_bytes())
        except EOFError:
            raised, text = "the process", "has ended"
        self._out.seek(start)
        return self._out.read().decode(errors="replace"), raised, text

    def close(self) -> None:
        self._ours.close()
        os.waitpid(self._child, 0)
        self._out.close()


def _interpret(connection: Connection) -> None:
    module: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    while True:
        try:
            block: Block = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        raised, text = "", ""
        try:
            # As a script has one, but without code: processes that are spawned run it again, and transformers 5.0 reads it where a
            # class of __main__ was derived from one of its models.
            module.__file__ = os.devnull
            before = dict(module.__dict__)
            _execute(block, module.__dict__)
            check_keywords(block, before, module.__dict__)
        except BaseException as error:
            raised, text = type(error).__name__, "".join(traceback.format_exception(error))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps((raised, text)))


def _execute(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block so that a traceback names the page and its line, and shows it."""
    source = "\n" * (block.line - 1) + block.code
    linecache.cache[block.page] = (len(source), None, source.splitlines(keepends=True), block.page)
    tree = _Fragments().visit(ast.parse(source))
    namespace[_Fragments.NAME] = check
    exec(compile(ast.fix_missing_locations(tree), block.page, "exec", dont_inherit=True), namespace)


class _Fragments(ast.NodeTransformer):
    """``FlexibleRunner(..., strategy="ddp")`` checks these arguments beside those of a small training."""

    NAME = "_check_arguments"

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        first = node.args[0] if node.args else None
        if getattr(node.func, "id", "") == "FlexibleRunner" and isinstance(first, ast.Constant) and first.value is ...:
            node.func, node.args = ast.Name(self.NAME, ast.Load()), []
        return node
