"""A block that is wrong fails the test, with page and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flextrain.testing import WorkerGroup

from ..conftest import IMPORTS
from .pages import WrongMark, blocks
from .running import go_through

WRONG = {
    "code": ("```python\nx = 1\n\nx.y\n```", "page.md:4:"),
    "line within a function": ("```python\ndef f():\n    return 1 / 0\n\n\nf()\n```", "page.md:3:"),
    "two blocks": ("```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```", "page.md:8:"),
    "hidden": ("<!-- hidden\nx = 1\n-->\n\n```python\nassert x == 2\n```", "page.md:6:"),
    "after fresh": ("```python\nx = 1\n```\n\n<!-- block: fresh -->\n```python\nx\n```", "page.md:7:"),
    "keyword": ("```python\ndefault_hooks = dict(checkpoint=dict(intervall=1))\n```", "intervall"),
    "keyword in a list": ('```python\ncustom_hooks = [dict(type="EMAHok")]\n```', "EMAHook"),
    "fragment": ('```python\nrunner = FlexibleRunner(..., strategy="fsdq")\n```', "fsdq"),
    "command": ("```sh\nls\nflextrain config show nowhere.py\n```", "page.md:3:"),
    "flag": ("```sh\nflextrain list --jsonn\n```", "page.md:2:"),
    "file": ("```sh\npython nowhere.py\n```", "page.md:2:"),
    "extra": ("```sh\npip install flextrain[nothing]\n```", "no extra nothing"),
    "target": ("```sh\nmake nothing\n```", "no target nothing"),
    "unknown program": ("```sh\nsbatch job.sh\n```", "mark the block"),
    "script": ('```python title="a.py"\nimport nothing_like_it\n```\n\n```sh\npython a.py\n```', "page.md:6:"),
    "one of two processes": (
        '```python title="a.py"\nimport os\n\nassert os.environ["RANK"] == "0"\n```\n\n'
        "```sh\ntorchrun --nproc-per-node 2 a.py\n```",
        "page.md:8:",
    ),
    "output": (
        '```python\nprint("loss 1.5")\n```\n\n<!-- block: output -->\n```text\nloss 2.5\nacc 1\n```',
        "page.md:8:",
    ),
    "output after text": (
        "```python\nprint(1)\n```\n\n```text\nx\n```\n\n<!-- block: output -->\n```text\nacc 1\n```",
        "page.md:11:",
    ),
    "no error": ("<!-- block: raises ValueError -->\n```python\nx = 1\n```", "raised nothing"),
    "json": ("```json\n{\n```", "page.md:2:"),
    "toml": ("```toml\n[a\n```", "page.md:2:"),
    "yaml": ("```yaml\na: [\n```", "page.md:2:"),
    "not run: syntax": ("<!-- block: not run, why -->\n```python\nx =\n```", "page.md:3:"),
    "not run: name": ("<!-- block: not run, why -->\n```python\nfrom flextrain import Rumner\n```", "Rumner"),
    "not run: key": (
        '<!-- block: not run, why -->\n```python\nx = dict(type="EMAHook", momentumm=1)\n```',
        "momentumm",
    ),
    "not run: type": ('<!-- block: not run, why -->\n```python\nx = dict(type="EMAHok")\n```', "EMAHok"),
    "not run: argument": ("<!-- block: not run, why -->\n```python\nFlexibleRunner(modle=1)\n```", "modle"),
    "not run: flag": ("<!-- block: not run, why -->\n```sh\nflextrain run --nprocs 8 train.py\n```", "--nprocs"),
    "not run: flag of torchrun": (
        "<!-- block: not run, why -->\n```sh\ntorchrun --nprocs 8 train.py\n```",
        "page.md:3:",
    ),
    "not run: flag of an example": (
        "<!-- block: full, why -->\n```sh\npython examples/gan.py --epoch 2\n```",
        "has no --epoch",
    ),
}
MARKS = {
    "unknown mark": "<!-- block: sometimes -->\n```python\n```",
    "no reason": "<!-- block: not run -->\n```python\n```",
    "no block": "<!-- block: fresh -->\ntext",
    "language": "```\nx\n```",
    "end": "```python\nx",
    "misspelt": "<!-- block : full, why -->\n```python\n```",
}


@pytest.fixture(scope="module")
def warm() -> Iterator[WorkerGroup]:
    with WorkerGroup(1, 120, imports=IMPORTS) as group:
        yield group


@pytest.mark.processes
def test_wrong_blocks(warm: WorkerGroup, tmp_path: Path) -> None:
    page, missed = tmp_path / "page.md", []
    for what, (text, says) in WRONG.items():
        page.write_text(f"{text}\n")
        (found,) = warm.run(go_through, blocks(page), False)
        if len(found) != 1 or says not in found[0]:
            missed.append((what, found))
    assert not missed


@pytest.mark.parametrize("text", MARKS.values(), ids=MARKS)
def test_wrong_marks(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.md").write_text(f"{text}\n")
    with pytest.raises(WrongMark, match=r"^page\.md:[12]: "):
        blocks(tmp_path / "page.md")


@pytest.mark.processes
def test_what_is_right(warm: WorkerGroup, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '```python title="a.py"\nimport os\nimport sys\n\nprint(f"rank {os.environ.get(\'RANK\')} of 1234 in 0.25 s", *sys.argv[1:])\n```\n\n'
        "```sh\npython a.py --x  # comment\ntorchrun --nproc-per-node 2 \\\n    a.py\nflextrain --version > v.txt\n```\n\n"
        "<!-- block: output -->\n```text\nrank None of 7 ... --x\n...\nrank 1 of 1,000 in 1e-3 s\n```\n\n"
        "```python\nfrom pathlib import Path\n\nassert Path('v.txt').read_text().startswith('flextrain')\n```\n\n"
        "<!-- block: raises ZeroDivisionError -->\n```python\n1 / 0\n```\n\n"
        "<!-- block: output -->\n```text\nZeroDivisionError: division by zero\n```\n"
    )
    (found,) = warm.run(go_through, blocks(page), False)
    assert not found
