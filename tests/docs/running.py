"""A page as its reader goes through it: from top to bottom, in an empty folder."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from .checking import names, problems
from .pages import ROOT, Block
from .processes import Interpreter
from .shell import lines, run, wrong

CHECKED = ("full", "not run")


def go_through(blocks: list[Block], everything: bool) -> list[str]:
    """What is wrong on a page, with page and line: the first failure of what runs, and all of what is only checked.

    Args:
        blocks: those of the page.
        everything: whether blocks that are marked "full" run too.
    """
    checked = CHECKED[1:] if everything else CHECKED
    defined = {name for block in blocks if block.language == "python" for name in names(block)}
    found = [
        said
        for block in blocks
        if block.mode in checked or block.language not in ("python", "sh")
        for said in problems(block, defined)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "benchmarks"):
            (Path(folder) / name).symlink_to(ROOT / name)
        reader = _Reader(Path(folder))
        try:
            ran = True
            for block in blocks:
                if block.mode == "output" and not ran:
                    continue  # of code that is only checked
                ran = block.mode not in checked
                if ran and (said := reader.read(block)):
                    return [*found, said]
        finally:
            reader.close()
    return found


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._home = self._folder = folder
        self._interpreter: Interpreter | None = None
        self._printed = ""

    def read(self, block: Block) -> str:
        """Do what a block says; the answer is what went wrong."""
        if block.mode == "output":
            return _differs(block, self._printed)
        if block.title and block.language == "diff":
            return _patch(block, self._folder / block.title)
        if block.title:
            (self._folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (self._folder / block.title).write_text(block.code)
            return ""
        if block.language == "python":
            return self._run(block)
        return self._call(block) if block.language == "sh" else ""

    def close(self) -> None:
        if self._interpreter:
            self._interpreter.close()
        self._interpreter = None

    def _run(self, block: Block) -> str:
        if block.mode == "fresh":
            self.close()
        self._interpreter = self._interpreter or Interpreter(self._home)
        self._printed, raised, text = self._interpreter.run(block)
        if block.mode == "raises":
            self._printed = text
            return "" if raised == block.detail else f"{block.where}: raised {raised or 'nothing'}, not {block.detail}"
        if not raised:
            return ""
        at = re.findall(rf'File "{re.escape(block.page)}", line (\d+)', text)
        return f"{block.page}:{at[-1] if at else block.line}: {text}\n{self._printed[-3000:]}"

    def _call(self, block: Block) -> str:
        self._printed = ""
        for line in lines(block.code):
            where = f"{block.page}:{block.line + line.number}: {line.text}"
            if said := wrong(line):
                return f"{where}: {said}"
            if line.words[0] == "cd":
                self._folder = (self._folder / line.words[1]).resolve()
                continue
            done = run(line, self._folder)
            self._printed += done.output
            if (done.status != 0) != (block.mode == "raises"):
                return f"{where}: status {done.status}\n{done.output[-3000:]}"
        return ""


def _patch(block: Block, file: Path) -> str:
    """Change a file as a block shows it; the lines before the change stand in it once."""
    lines = block.code.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
    text = file.read_text() if file.is_file() else ""
    if text.count(old) != 1:
        return f"{block.where}: {text.count(old)} times in {block.title}: {old}"
    file.write_text(text.replace(old, new))
    return ""


def _differs(block: Block, printed: str) -> str:
    """The first line of a shown output that was not printed, in this order; ``...`` and numbers stand for any."""
    rest = [line.strip() for line in printed.splitlines()]
    for number, line in enumerate(block.code.splitlines()):
        if line.strip() in ("", "..."):
            continue
        pattern = re.compile(_pattern(line.strip()))
        at = next((n for n, text in enumerate(rest) if pattern.fullmatch(text)), None)
        if at is None:
            return f"{block.page}:{block.line + number}: was not printed: {line}\n" + "\n".join(rest[-30:])
        rest = rest[at + 1 :]
    return ""


def _pattern(line: str) -> str:
    parts = re.split(r"(\.\.\.|\s+|\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)", line)
    return "".join(_part(part) for part in parts)


def _part(text: str) -> str:
    if text == "...":
        return ".*"
    if text.isspace():
        return r"\s+"
    return r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?" if re.match(r"\d", text) else re.escape(text)
