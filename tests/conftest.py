"""Worker groups shared by the whole session, and guards that fail a test which leaves something behind."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from packaging.version import Version

# The session of pytest-xdist that only hands out tests does without torch: what needs it is imported where it is used.
if TYPE_CHECKING:
    from flextrain.testing import WorkerGroup

# Before torch is imported, for this process and all that tests start: the models are too small for several threads, which
# would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A terminal's, which tables are fitted to: the sessions of pytest-xdist have them, others do not.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Set by libraries when they are first used, not by the test that happened to use them first.
LIBRARY_VARIABLES = (
    "PYTEST_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "KMP_",
    "RAY_",
    "CUDA_MODULE_LOADING",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TF2_BEHAVIOR",
)
THREAD_GRACE_S = 2.0
# Imported once, in the process that all workers are forked from. Any optimizer imports torch._dynamo, and DeepSpeed's engine
# torch's compiler: each new worker would need most of a second for it. Digits are what examples and pages train on, and each
# worker takes more than a second for peft with transformers' models.
PREFERRED = ("deepspeed", "sklearn.datasets", "peft", "transformers.models.llama.modeling_llama", "torchmetrics")
IMPORTS = [
    "pytest",
    "torch._inductor.compile_fx",
    *(name for name in PREFERRED if importlib.util.find_spec(name.partition(".")[0])),
]

# Tests with one of these fixtures have the marker ``processes``, as all have that are ``distributed``.
PROCESS_FIXTURES = frozenset({"workers", "run_example", "simulated_npu", "wheel_files"}) | (
    {"on_device"} if os.environ.get("FLEXTRAIN_TEST_DEVICE", "cpu") != "cpu" else set()
)

WorkerFactory = Callable[[int], "WorkerGroup"]


LEFT_TO_FULL = Path(__file__).with_name("left_to_full.txt")
LEFT_TO_FULL_UNKNOWN = pytest.StashKey[list[str]]()
"""Its lines that name no test; known where all tests are collected."""
ALL_OF_THEM = pytest.StashKey[bool]()
"""Whether all tests are collected, before some are chosen by their markers."""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    left = {line for line in LEFT_TO_FULL.read_text().splitlines() if not line.startswith("#")}
    found = set()
    for item in items:
        names = {item.nodeid, item.nodeid.partition("[")[0]} & left
        if names:
            found |= names
            item.add_marker("full")
        if item.get_closest_marker("distributed") or not PROCESS_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
    # For a test: an error here would end a session of xdist without its words, and hide a module that cannot be imported.
    is_whole = config.stash[ALL_OF_THEM] and not config.option.ignore and not session.testsfailed
    config.stash[LEFT_TO_FULL_UNKNOWN] = sorted(left - found) if is_whole else []
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.nodeid.partition("::")[0])  # see pytest_collection
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = in_one_session(items)


def in_one_session(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests of the simulated device, whose processes take seconds to start, where the first session comes to them early.

    Each session has a part of the list, and those that are done take tests from the end of another's part.
    """
    slow = [item for item in items if "simulated_npu" in getattr(item, "fixturenames", ())]
    rest = [item for item in items if "simulated_npu" not in getattr(item, "fixturenames", ())]
    start = len(rest) // 10
    return rest[:start] + slow + rest[start:]


def pytest_collection(session: pytest.Session) -> None:
    """Spare the sessions work that each would do.

    Modules and tests are for ever: the garbage collector need not look at them again and again, a third of the time that
    collecting takes. Another third, in a fresh clone, is compiling the tests: each session begins elsewhere in the list of
    files, and later finds what the others have compiled.
    """
    gc.disable()
    config = session.config
    config.stash[ALL_OF_THEM] = config.args == config.getini("testpaths")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and config.stash[ALL_OF_THEM]:
        files = sorted(str(path) for folder in config.args for path in Path(folder).rglob("test_*.py"))
        start = int(worker.removeprefix("gw")) * len(files) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args[:] = files[start:] + files[:start]


def pytest_collection_finish() -> None:
    """See pytest_collection."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("processes"):
        start_fork_server()


@functools.cache
def start_fork_server() -> None:
    """Start the process that workers are forked from, before a group that a test makes does it without the imports."""
    from flextrain.testing._worker import serve
    from flextrain.testing.loop import environ
    from flextrain.testing.workers import NO_ACCELERATORS

    with environ(OMP_NUM_THREADS="1", **NO_ACCELERATORS):
        forkserver.set_forkserver_preload([serve.__module__, *IMPORTS])
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerFactory]:
    """``workers(n)`` is the session's group of n processes, started when it is first asked for.

    One group of more than two processes is kept at a time: a process takes half a gigabyte, and sessions of pytest run beside
    each other.
    """
    from flextrain.testing import WorkerGroup

    groups: dict[int, Any] = {}
    kind: Any = functools.partial(WorkerGroup, timeout_s=180.0)  # compiling takes a busy machine minutes
    if os.environ.get("FLEXTRAIN_TEST_DEVICE") == "npu":
        from .npu.simulated import NpuWorkers, built

        kind = NpuWorkers
        built()

    def group_of(world_size: int) -> WorkerGroup:
        if world_size not in groups:
            for large in [size for size in groups if size > 2 and world_size > 2]:
                groups.pop(large).close()
            groups[world_size] = kind(world_size, imports=IMPORTS)
        return cast("WorkerGroup", groups[world_size])

    yield group_of
    for group in groups.values():
        group.close()


@pytest.fixture
def on_device(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``on_device(function, *args)`` calls it in a process that has the device of tests: this one has the CPU."""
    if os.environ.get("FLEXTRAIN_TEST_DEVICE", "cpu") == "cpu":
        return lambda function, *args: function(*args)
    group = request.getfixturevalue("workers1")
    return lambda function, *args: group.run(function, *args)[0]


@pytest.fixture(scope="session")
def workers1(workers: WorkerFactory) -> WorkerGroup:
    return workers(1)


@pytest.fixture(scope="session")
def workers2(workers: WorkerFactory) -> WorkerGroup:
    return workers(2)


@pytest.fixture
def workers3(workers: WorkerFactory) -> WorkerGroup:
    return workers(3)


@pytest.fixture(scope="session")
def async_io() -> None:
    """DeepSpeed's asynchronous input and output, compiled once on this machine, which takes minutes."""
    pytest.importorskip("deepspeed", reason="needs pip install flextrain[deepspeed]")
    from flextrain.core.base.errors import StrategyError
    from flextrain.strategies.deepspeed.swap_files import check_async_io, load_async_io

    try:
        check_async_io()
        load_async_io(1800.0)
    except StrategyError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _no_process_without_marker(request: pytest.FixtureRequest) -> Iterator[None]:
    """make test-fast leaves out what starts processes, and knows it by the marker."""
    STARTED.clear()
    yield
    if not request.node.get_closest_marker("processes"):
        assert not STARTED, f"starts a process ({STARTED[0]}): mark it with processes"


STARTED: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("subprocess.Popen", "os.fork"):  # every file that is opened is an event
        return
    # Compilers and the like, which libraries ask for their version once in a while, are not what is looked for. Before
    # torch 2.7, importing its compiler starts the processes that compile.
    command = [str(part) for part in arguments[1]] if event == "subprocess.Popen" else []
    compiles = any("/torch/_inductor/compile_worker/" in part for part in command)
    if event == "os.fork" or (sys.executable in command and not compiles):
        STARTED.append(event)


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def _no_leaked_variables() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and not name.startswith(LIBRARY_VARIABLES)
    )
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"environment variables left changed: {', '.join(changed)} (use monkeypatch.setenv)"


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A runner's ``log_level`` stays with the logger, and would keep the next test's lines from it.

    It also stops passing lines on to the root logger, and pytest's ``caplog`` is given those of such loggers only where they did
    so before the test.
    """
    logger = logging.getLogger("flextrain")
    logger.propagate = False
    if logger.level:  # a fixture of a whole module may have had a runner; setting it touches every logger there is
        logger.setLevel(logging.NOTSET)
    yield
    if logger.level:
        logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    leaked = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in leaked:
        thread.join(THREAD_GRACE_S)
    names = [thread.name for thread in leaked if thread.is_alive()]
    assert not names, f"threads left running: {', '.join(names)}"


@pytest.fixture(autouse=True)
def _loaders_end_with_their_test() -> Iterator[None]:
    yield
    if "flextrain.core.torch_compat.torch_private" in sys.modules:
        sys.modules["flextrain.core.torch_compat.torch_private"].end_loader_workers()


@pytest.fixture(autouse=True)
def _no_leaked_process_group() -> Iterator[None]:
    yield
    dist = sys.modules.get("torch.distributed")
    leaked = dist is not None and dist.is_available() and dist.is_initialized()
    if leaked:
        dist.destroy_process_group()
    assert not leaked, "a process group was left initialised (call strategy.leave())"


# What FSDPStrategy says on the CPU before torch 2.7.
NO_CPU_SHARDS = 'shards on accelerators only, "cpu" needs torch 2.7'


# What is refused by design with older versions of a package: a part of the message, and a version that must not refuse it.
REFUSED_BEFORE = (
    (NO_CPU_SHARDS, "torch", "2.7"),
    ("with torch 2.6, stage 3 has no gradients of what is recomputed", "torch", "2.7"),
    ("needs FSDPModule.finalize_backward, which torch", "torch", "2.15"),
    ("was not checked, figures might be wrong; plan with torch 2.15", "torch", "2.15"),
    ("matrices in one are divided in a way that torch", "torch", "2.15"),
    ("an error ended backward, after which FSDP of torch", "torch", "2.15"),
    ("asks for gradients of gradients (create_graph=True), which torch", "torch", "2.15"),
    ('"auto" needs transformers 5.16 or newer', "transformers", "5.16"),
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip what is refused by design with old versions; with later ones it is a failure."""
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        for message, package, since in REFUSED_BEFORE:
            if message in str(error) and Version(found := importlib.metadata.version(package)) < Version(since):
                dist = sys.modules["torch.distributed"]
                if dist.is_initialized():  # the test did not come as far as to leave it
                    dist.destroy_process_group()
                pytest.skip(f"{package} {found}: {message}")
        raise
