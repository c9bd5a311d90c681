"""What the interpreter shows of errors that nobody catches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from flextrain.core.base.errors import is_first_to_say

from ..ports import reserved_port

LINE = "flextrain: ConfigError: train_cfg.max_epoch: unknown key ({}; FLEXTRAIN_TRACEBACK=1 shows the traceback)\n"
HEAD = "import sys\nfrom flextrain.core.base.errors import ConfigError\ndef wrong():\n    raise ConfigError('train_cfg.max_epoch: unknown key')\n"
OF_THE_LIBRARY = "exec(compile('def call(f):\\n try: f()\\n except KeyError as e: raise ConfigError(\"model: failed\") from e', 'x.py', 'exec'), {**globals(), '__name__': 'flextrain.x'}, globals())\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    "script, options, traceback, ending",
    [
        pytest.param("wrong()", {}, False, LINE.format("script.py:4"), id="one-line"),
        pytest.param("try: {}['a']\nexcept KeyError: wrong()", {}, True, "unknown key\n", id="after-the-user-s-bug"),
        pytest.param(f"{OF_THE_LIBRARY}call(lambda: {{}}['a'])", {}, True, "model: failed\n", id="the-user-s-bug"),
        pytest.param("{}['a']", {}, True, "KeyError: 'a'\n", id="no-error-of-ours"),
        pytest.param("try: wrong()\nexcept ConfigError: {}['a']", {}, True, "KeyError: 'a'\n", id="later-bug"),
        pytest.param("wrong()", {"env": {"FLEXTRAIN_TRACEBACK": "1"}}, True, "unknown key\n", id="asked-for"),
        pytest.param("sys.excepthook = lambda *args: print('mine', file=sys.stderr)\nwrong()", {}, False, "mine\n", id="own-hook"),
        pytest.param("wrong()", {"flags": ["-i"], "input": ""}, True, "unknown key\n", id="interactive"),
        pytest.param(
            "import logging\nlogger = logging.getLogger('flextrain')\nlogger.addHandler(logging.FileHandler('x.log'))\n"
            "logger.propagate = False\nwrong()",
            {},
            False,
            "x.log has the traceback)\n",
            id="log-file",
        ),
    ],
)  # fmt: skip
def test_an_error_of_ours_is_one_line_unless_its_traceback_is_needed(
    tmp_path: Path, script: str, options: dict, traceback: bool, ending: str
) -> None:
    (tmp_path / "script.py").write_text(f"{HEAD}{script}\n")
    done = subprocess.run(
        [sys.executable, *options.get("flags", []), "script.py"],
        cwd=tmp_path,
        env={**os.environ, **options.get("env", {})},
        input=options.get("input"),
        capture_output=True,
        text=True,
    )
    said = done.stderr.removesuffix(">>> \n")
    assert said.endswith(ending)
    assert ("Traceback" in said) == traceback
    assert traceback or said.count("\n") == 1
    if "x.log" in ending:
        assert "ConfigError: train_cfg.max_epoch: unknown key\nTraceback" in (tmp_path / "x.log").read_text()
    assert done.returncode == (0 if "flags" in options else 1)


def test_of_the_processes_of_torchrun_one_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    about = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), WORLD_SIZE="2", TORCHELASTIC_RESTART_COUNT="0")
    for name, value in about.items():
        monkeypatch.setenv(name, value)

    def first(rank: int, text: str) -> bool:
        monkeypatch.setenv("RANK", str(rank))
        return is_first_to_say(text)

    assert [first(0, "a"), first(1, "a")] == [True, True], "nobody keeps a store before the processes meet"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert [first(1, "a"), first(0, "a"), first(0, "b"), first(1, "b"), first(1, "a")] == [
        True,
        False,
        True,
        False,
        True,
    ]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert first(0, "a"), "a restarted process says it again"


def test_a_store_that_has_ended_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(dist, "TCPStore", lambda *where, **options: asked.append(where))
    with reserved_port() as port:
        about = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK="1")
        for name, value in dict(about, TORCHELASTIC_USE_AGENT_STORE="True").items():
            monkeypatch.setenv(name, value)
        assert is_first_to_say("a")
    assert not asked, (
        "TCPStore tries for seconds to reach it, in which the guard of the run ends the process as a stalled one"
    )
