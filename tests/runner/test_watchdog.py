"""The parts of the watchdog: clocks, beats, verdicts, stragglers, options, and errors that follow from another process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flextrain import heartbeat
from flextrain.core.base.errors import ConfigError, LaunchError, StrategyError
from flextrain.core.base.events import heartbeats
from flextrain.core.comm.agreement import StoreLostError
from flextrain.core.model.base_model import class_name
from flextrain.runner.health.exchange import Ending, Identity, follows_from_another
from flextrain.runner.health.exchange import Exchange as RealExchange
from flextrain.runner.health.stalls import (
    LEAST_S,
    Age,
    Beat,
    Clock,
    Gathering,
    Stragglers,
    Whereabouts,
    is_compiling,
    ranks,
    verdict,
)
from flextrain.runner.options import Environment, check_options


class Bulletin:
    """A store in this process."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def read(self, keys: list[str]) -> list[str | None]:
        return [self.texts.get(key) for key in keys]

    def put(self, key: str, text: str) -> None:
        self.texts[key] = text

    def count(self, key: str, add: int = 1) -> int:
        self.counts[key] = self.counts.get(key, 0) + add
        return self.counts[key]


def test_all_answers_can_be_read_at_once_from_the_beginning() -> None:
    """The store is asked for each text alone as long as one of them is missing."""
    store: Any = Bulletin()
    store.world_size = 3
    exchanges = [RealExchange(store, Identity(rank, 7, "node1")) for rank in range(3)]
    assert None not in store.read([f"answer {rank}" for rank in range(3)])
    number = exchanges[0].alarm()
    assert exchanges[0].silent(number) == [0, 1, 2]
    assert all(exchange.has_alarm() for exchange in exchanges[:2])
    assert exchanges[2].silent(number) == [2]


class Exchange:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.bulletin = rank, world_size, Bulletin()


def gathering(size: int, rank: int = 0) -> tuple[Any, Any, Iterator[None]]:
    """A gathering of a rank, its store, and an iterator each step of which is a second."""
    now = 0.0
    clock, exchange = Clock(lambda: now), Exchange(rank, size)
    found: Any = Gathering(exchange, clock, 10.0, 30.0)  # type: ignore[arg-type]

    def seconds() -> Iterator[None]:
        nonlocal now
        while True:
            now += 1.0
            clock.tick()
            yield

    return found, exchange.bulletin, seconds()


def send(bulletin: Any, rank: int, beat: Beat) -> None:
    if f"beat {rank}" not in bulletin.texts:
        bulletin.count("beating")
    bulletin.texts[f"beat {rank}"] = beat.text()


def seconds_to_stall(found: Any, seconds: Iterator[None], limit: int = 100) -> int | None:
    for second in range(limit):
        next(seconds)
        if found.gather() is not None:
            return second
    return None


def test_a_clock_does_not_count_the_time_in_which_the_process_was_stopped() -> None:
    times = iter([0.0, 1.0, 1000.0, 1001.0])
    clock = Clock(lambda: next(times))
    age = Age(clock)
    clock.tick()
    assert clock.tick() < 5.0
    clock.tick()
    assert 3.0 < age.seconds < 5.0
    age.note("new")
    assert age.seconds == 0


def test_a_stall_is_when_no_process_gets_on() -> None:
    found, bulletin, seconds = gathering(2)
    send(bulletin, 0, Beat(1, True, False, False, 5))
    send(bulletin, 1, Beat(1, True, False, False, 5))
    for count in range(40):  # one of them gets on
        send(bulletin, 1, Beat(1, True, False, False, count))
        next(seconds)
        assert found.gather() is None
    assert 9 <= (seconds_to_stall(found, seconds) or 0) <= 12


def test_what_a_process_was_doing_when_it_was_looked_at_is_no_progress() -> None:
    found, bulletin, seconds = gathering(1)
    for looks in range(9):
        send(bulletin, 0, Beat(1, True, False, False, 5, (looks, 0, 0)))
        next(seconds)
        assert found.gather() is None
    send(bulletin, 0, Beat(1, True, False, False, 5, (10, 0, 0)))
    assert (seconds_to_stall(found, seconds) or 99) <= 4


@pytest.mark.parametrize(
    ("first", "second", "least"),
    [
        (Beat(1, True, True), Beat(1, True, True), 29),  # before the first update of all
        (Beat(1, True, False), Beat(1, True, True), 9),  # one was stopped before it could tell of it
        (Beat(1, True, False), Beat(1, True, False, True), 29),  # one compiles
        (Beat(1, True, False), Beat(1, False), 9),  # one has left the run
        (Beat(2, True, False), Beat(1, False), 9),  # one cannot tell any more that it has begun
    ],
)
def test_the_limit_depends_on_what_the_processes_do(first: Beat, second: Beat, least: int) -> None:
    found, bulletin, seconds = gathering(2)
    send(bulletin, 0, first)
    send(bulletin, 1, second)
    assert least <= (seconds_to_stall(found, seconds) or 0) <= least + 3


def test_nobody_in_a_run_is_no_stall() -> None:
    found, bulletin, seconds = gathering(2)
    for rank in range(2):
        send(bulletin, rank, Beat(1, False))
    assert seconds_to_stall(found, seconds) is None
    assert found.finished(1) == [0, 1]


def test_another_rank_gathers_when_rank_0_is_silent() -> None:
    found, bulletin, seconds = gathering(3, rank=1)
    for _ in range(20):
        bulletin.count("gathered")  # rank 0 does
        next(seconds)
        assert not found.is_mine(1.0)
    silent = 0
    while not found.is_mine(1.0):
        silent += 1
        next(seconds)
        assert silent < 20
    assert silent >= 5
    bulletin.count("gathered")
    assert found.is_mine(1.0)
    last, store, seconds = gathering(99, rank=9)  # does not ask the store at all
    for _ in range(99):
        next(seconds)
        assert not last.is_mine(1.0)
    assert store.counts == {}


def report(
    rank: int, words: str, waits: bool, iteration: int = 10, collective: str = "", failed: str = ""
) -> Whereabouts:
    return Whereabouts(rank, iteration, words, waits, collective, "", failed)


@pytest.mark.parametrize(
    ("reports", "silent", "finished", "said"),
    [
        ([report(0, " in backward", True), report(1, " in data, a.py:3", False)], {}, [], "rank 1 waits for nobody in iteration 11, in data, a.py:3"),
        ([report(0, " in backward", True)], {1: "rank 1 (process 7 on b) is stopped (SIGSTOP)"}, [], "rank 1 (process 7 on b) is stopped (SIGSTOP)"),
        ([report(0, " in backward", True), report(1, " in x", True, 9)], {}, [], "rank 1 is behind the others in iteration 10, in x"),
        ([report(0, " in x", True), report(1, " in y", True)], {}, [], "the ranks are in different calls: rank 0 is in iteration 11, in x, rank 1 is in iteration 11, in y"),
        ([report(0, " in x", True, collective="all_reduce number 3"), report(1, " in x", True, collective="barrier number 3")], {}, [], "the ranks wait in different calls"),
        ([report(rank, " in y" if rank == 5 else " in x", True) for rank in range(9)], {}, [], "rank 5 is not where the others are in iteration 11, in y"),
        ([report(0, " in x", True), report(1, " in x", True)], {}, [], "all ranks are at the same point, in x"),
        ([report(0, " in x", True)], {}, [1], "rank 1 has finished the run already"),
        ([report(0, " in x", True), report(1, " in custom_hooks (A.on_exception)", True, failed="ValueError: b")], {}, [], "rank 1 has failed, ValueError: b, and is still in custom_hooks"),
    ],
)  # fmt: skip
def test_the_verdict_names_who_keeps_the_others(
    reports: list[Whereabouts], silent: dict[int, str], finished: list[int], said: str
) -> None:
    text = verdict(12.3, {report.rank: report for report in reports}, silent, finished)
    assert text.partition("\n")[0].startswith(f"The run stands still for 12 s: {said}"), text


def test_many_ranks_that_do_the_same_are_one_line() -> None:
    reports = {rank: report(rank, " in backward", True) for rank in range(1000) if rank != 7}
    text = verdict(600, reports, {7: "rank 7 does not answer"})
    assert text.splitlines() == [
        "The run stands still for 600 s: rank 7 does not answer",
        "  ranks 0-6, 8-999 waits for others in iteration 11, in backward".replace("waits", "wait"),
    ]
    assert ranks([3]) == "rank 3"


def test_a_straggler_is_named_once_after_two_minutes() -> None:
    watch = Stragglers()
    found = []
    for minute in range(6):
        total = 300 * minute
        samples = [(total, int(total * share), 0) for share in (0.3, 0.31, 0.29, 0.6)]
        found.append(watch.compare(LEAST_S * minute, samples))
    assert [len(lines) for lines in found] == [0, 0, 1, 0, 0, 0]
    rank, said = found[2][0]
    assert rank == 3
    assert "2.0 times the median in data loading (60% of the time, 30% in the median)" in said


@pytest.mark.parametrize(
    "shares",
    [(0.3, 0.45, 0.3, 0.3), (0.02, 0.1, 0.02, 0.02), (0.6, 0.85, 0.6, 0.6), (0.9, 0.9, 0.9, 0.9)],
    ids=["less than half more", "little altogether", "a small ratio", "all alike"],
)
def test_a_small_difference_is_no_straggler(shares: tuple[float, ...]) -> None:
    watch = Stragglers()
    for minute in range(6):
        total = 300 * minute
        assert watch.compare(LEAST_S * minute, [(total, int(total * share), 0) for share in shares]) == []


def test_one_slow_minute_is_no_straggler() -> None:
    watch, data = Stragglers(), [0, 0]
    for minute in range(8):
        data = [data[0] + 30, data[1] + (240 if minute % 2 else 30)]
        assert watch.compare(LEAST_S * minute, [(300 * minute, value, 0) for value in data]) == []


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[.../gloo/transport/tcp/pair.cc:545] Connection closed by peer [127.0.0.1]:57052"), True),
        (StoreLostError("the store of the job was lost"), True),
        (StrategyError("train(): rank 1 did not come within 60 s; every process has to call it"), True),
        (LaunchError("another process failed in the dry pass: ValueError: x"), True),
        (StrategyError("train(): rank 1 is in val(); every process has to call it"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # storage of the user's
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("CUDA out of memory"), False),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nConnection reset by peer"), False),
    ],
    ids=str,
)
def test_which_errors_follow_from_another_process(error: BaseException, follows: bool) -> None:
    assert follows_from_another(error) == follows


def test_an_error_raised_because_of_one_follows_too() -> None:
    error = KeyError("in the handler")
    error.__context__ = RuntimeError("Connection closed by peer")
    assert follows_from_another(error)


def test_an_ending_survives_its_text() -> None:
    me = Identity.of_this_process(3)
    assert Identity.read(me.text()) == me
    assert me.is_beside(Identity.read(me.text()))
    assert not me.has_ended()
    ending = Ending("failed", me, "ValueError: a", 7)
    assert Ending.read(ending.text()) == ending
    assert ending.words(with_machine=False) == "rank 3 failed: ValueError: a"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(stal_s=1), 'env_cfg.watchdog.stal_s: unknown key, did you mean "stall_s"?'),
        (dict(stall_s=0), "env_cfg.watchdog.stall_s: 0 is not allowed, give 1.0 or more"),
        ("off", 'env_cfg.watchdog: "off" is not allowed, give True or False or a dict'),
    ],
)
def test_wrong_options_name_the_key(given: Any, message: str) -> None:
    others: dict[str, Any] = dict.fromkeys(
        ("experiment_name", "load_from", "launcher", "auto_scale_lr", "compile", "cfg")
    )
    with pytest.raises(ConfigError, match="watchdog") as caught:
        check_options({"work_dir": "x", "resume": False, "randomness": {}, "env_cfg": dict(watchdog=given), **others})
    assert str(caught.value) == message


def test_the_watchdog_is_on_unless_it_is_turned_off() -> None:
    assert Environment().watchdog_options is not None
    assert Environment(watchdog=False).watchdog_options is None


def test_a_heartbeat_counts_in_any_thread() -> None:
    before = heartbeats()
    thread = threading.Thread(target=heartbeat)
    thread.start()
    thread.join()
    assert heartbeats() == before + 1


def test_the_name_of_a_class_is_the_user_s() -> None:
    import torch

    class Mine(torch.nn.Module):
        pass

    replaced = type("FSDPMine", (Mine,), {"__module__": "torch.distributed.fsdp._fully_shard"})
    assert class_name(replaced()) == "Mine"
    assert class_name(Mine()) == "Mine"


def test_compiling_is_told_from_running_what_was_compiled() -> None:
    """Hooks of FSDP are exempt from compiling, as ``exempt`` is here: a hang in one would have 1800 s."""
    seen: dict[str, bool] = {}

    def look(where: str) -> None:
        seen[where] = is_compiling(threading.get_ident())

    def backend(module: Any, inputs: Any) -> Any:
        look("in the compiler")

        def compiled(*values: Any) -> Any:
            look("in compiled code")
            return module(*values)

        return compiled

    @torch.compiler.disable
    def exempt() -> None:
        look("in exempt code")

    exempt()
    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert seen == {"in exempt code": False, "in the compiler": True, "in compiled code": False}
