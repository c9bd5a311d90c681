"""`flextrain plan`: what a training on many processes would need, without them."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..core.base.errors import ConfigError
from .output import FoldedHelp, console, print_json

if TYPE_CHECKING:
    from ..plan.machines import MachineKind
    from ..plan.plan import StrategyPlan, TrainingPlan
    from ..plan.step_time import Measured

DESCRIPTION = """\
Plan a script's training on many processes: memory by kind and where in the update its peak is, bytes of collectives by
axis of the mesh and by link, floating-point operations, what a checkpoint takes, and with --machine how long an update
takes.

SCRIPT runs, with the arguments after --, up to the construction of its FlexibleRunner, as in `flextrain verify`. Set-up
and two updates are then made under each strategy as one rank of WORLD_SIZE, on tensors without values: no accelerator is
used, and no memory for weights. For a strategy that does not fit on --device-memory, changes that need less are planned
in the same way, until one fits. The batches are the first ones of the script's data. Hooks, validation, checkpoints and
torch.compile are left out. All processes are taken to have what this one has.

Exit status: 0 all strategies are possible and fit (with --fit: at least one fits), 1 one is refused or does not fit, 2 nothing could be planned."""


def add(commands: Any) -> None:
    """Add the command to argparse's."""
    command = commands.add_parser(
        "plan",
        help="tell what a training on many processes needs, without them",
        usage="flextrain plan SCRIPT --world-size N [options] [-- SCRIPT_ARGUMENT ...]\n"
        "       flextrain plan --from PLAN.json [options]",
        formatter_class=FoldedHelp,
        description=DESCRIPTION,
    )
    command.add_argument(
        "script",
        metavar="SCRIPT",
        nargs="?",
        help="a Python file, or a configuration as for `flextrain train`, see above",
    )
    command.add_argument("--world-size", type=int, metavar="N", help="number of processes")
    command.add_argument(
        "--nodes", type=int, metavar="N", help="number of machines; default: as many as --machine needs, or 1"
    )
    command.add_argument(
        "--device-memory", metavar="SIZE", help="memory of one device, such as 80GiB; default: that of --machine"
    )
    command.add_argument(
        "--machine",
        metavar="NAME",
        help="estimate how long an update takes on it: a name of `flextrain list machines`, such as h100, or a file .json",
    )
    command.add_argument(
        "--calibrate",
        metavar="STRATEGY=SECONDS",
        help="fit these times to an update that was measured: ddp=1.84s, or ddp=scalars.json, the log of a run; "
        "PLAN.json:ddp=1.84s if it had other processes, with the plan of these",
    )
    command.add_argument("--disk", metavar="RATE", help="what a process writes of a checkpoint, such as 2GB/s")
    command.add_argument("--disk-of-all", metavar="RATE", help="the same of all processes together, such as 100GB/s")
    command.add_argument(
        "--strategies",
        default="ddp,fsdp",
        help="names with commas, as for `flextrain verify`, such as fsdp,mesh:tp8xpp4; default: ddp,fsdp",
    )
    command.add_argument(
        "--fit",
        metavar="AXES",
        help="instead of strategies: search over all meshes of these axes, such as tp,pp,dp_replicate, for those that fit on "
        "--device-memory, and show the ten that send the least, or with --machine take the least time",
    )
    command.add_argument(
        "--fit-limit", type=int, default=24, help="largest number of meshes that are planned for --fit; default: 24"
    )
    command.add_argument(
        "--no-advice",
        action="store_true",
        help="do not look for changes with which a strategy fits that does not; each one takes as long as the strategy",
    )
    command.add_argument(
        "--timeout", type=float, default=600.0, help="largest number of seconds for one rank; default: 600"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--html",
        metavar="PATH",
        help="write the plan as one HTML file too, with charts; needs Matplotlib, flextrain[plots]",
    )
    command.add_argument(
        "--from",
        dest="saved",
        metavar="PLAN.json",
        help="instead of a script: a file with what --json has printed, to show it as a table, or with --html as a page",
    )
    defaults = {name: command.get_default(name) for name in vars(command.parse_known_args([])[0])}
    command.set_defaults(run=run, takes_script_arguments=True, defaults=defaults)


def run(arguments: argparse.Namespace) -> int:
    """Plan strategies; see `plan`."""
    _check(arguments)
    from ..plan.html import (
        check_page,
        write_page,  # import torch, which other commands do not need
    )
    from ..plan.plan import read_plan
    from ..plan.report import report
    from ..plan.step_time import with_times

    if arguments.html is not None:
        check_page(arguments.html)
    machine, measured = _machine(arguments)
    if arguments.saved is None:
        found = _plan(arguments, machine, measured)
    else:
        found = read_plan(arguments.saved)
        found = found if machine is None else with_times(found, machine, measured)
    if arguments.html is not None:
        write_page(found, arguments.html)
    print_json(found.as_json()) if arguments.json else console().print(report(found))
    return found.exit_status


_TO_SHOW = ("saved", "json", "html", "machine", "calibrate")
"""Options that say how a plan is shown and what is reckoned from it, and not how it is made."""


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if there is nothing to plan, or an option that a saved plan does not heed."""
    if arguments.saved is not None:
        for name, default in arguments.defaults.items():
            value = getattr(arguments, name)
            if name not in _TO_SHOW and value != default:
                raise ConfigError(
                    f"plan.{name}: {value} has no effect with --from, the plan is made already; leave it out"
                )
        if arguments.script_arguments:
            raise ConfigError("plan.script: its arguments have no effect with --from, the plan is made already")
    elif arguments.script is None:
        raise ConfigError("plan.script: missing, give a script, or --from with a saved plan")
    elif arguments.world_size is None:
        raise ConfigError("plan.world_size: missing, give --world-size with the number of processes")
    elif arguments.fit is not None and arguments.strategies != arguments.defaults["strategies"]:
        raise ConfigError(f"plan.fit: {arguments.fit} was given with --strategies, give one of them")
    elif arguments.fit is None and arguments.fit_limit != arguments.defaults["fit_limit"]:
        raise ConfigError(f"plan.fit_limit: {arguments.fit_limit} has no effect without --fit, leave it out")


def _machine(arguments: argparse.Namespace) -> tuple[MachineKind | None, Measured | None]:
    from ..plan.machines import machine_named
    from ..plan.step_time import measured_in

    if arguments.machine is None and arguments.calibrate is not None:
        raise ConfigError("plan.calibrate: has no meaning without a machine, give --machine")
    machine = None if arguments.machine is None else machine_named(arguments.machine)
    return machine, None if arguments.calibrate is None else measured_in(arguments.calibrate)


def _plan(arguments: argparse.Namespace, machine: MachineKind | None, measured: Measured | None) -> TrainingPlan:
    from rich.console import Console
    from rich.text import Text

    from ..plan.fit import axes_in
    from ..plan.per_strategy import plan, rate_in_bytes, size_in_bytes
    from ..strategy_options import names_in

    names = names_in(arguments.strategies, "plan.strategies")
    axes = None if arguments.fit is None else axes_in(arguments.fit)
    memory = arguments.device_memory
    disk, of_all = (
        None if rate is None else rate_in_bytes(rate, f"plan.{key}")
        for key, rate in (("disk", arguments.disk), ("disk_of_all", arguments.disk_of_all))
    )
    err = Console(stderr=True, markup=False, emoji=False)

    now: dict[str, str] = {}

    def say(what: str) -> None:
        if not err.is_terminal:
            err.print(Text(f"Planning: {what}"), soft_wrap=True)

    def show(what: str, phase: str, seconds: float) -> None:
        now[what] = f"{what}: {phase}, {seconds:.0f} s"
        status.update(Text("; ".join([*now.values()]), overflow="ellipsis", no_wrap=True))

    def tell(plan: TrainingPlan, found: StrategyPlan, seconds: float) -> None:
        from ..core.base.tensors import size_text  # imports torch, which other commands do not need

        now.pop(found.strategy, None)
        fits = {True: ", fits", False: ", does not fit", None: ""}[plan.fits(found)]
        said = found.message if found.highest is None else f"{size_text(found.highest.peak.total)} at the peak{fits}"
        err.print(Text(f"{found.strategy}: {found.status} in {seconds:.0f} s, {said}"), soft_wrap=True)

    with _ending_at_sigterm(), err.status(Text("Starting a process")) as status:
        return plan(
            arguments.script,
            names if axes is None else [],
            world_size=arguments.world_size,
            nodes=arguments.nodes,
            arguments=arguments.script_arguments,
            device_memory=None if memory is None else size_in_bytes(memory, "plan.device_memory"),
            machine=machine,
            measured=measured,
            disk=disk,
            disk_of_all=of_all,
            advice=not arguments.no_advice,
            fit_axes=axes,
            fit_limit=arguments.fit_limit,
            timeout_s=arguments.timeout,
            on_progress=say,
            on_phase=show,
            on_result=tell,
        )


@contextlib.contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Context in which SIGTERM ends this process as Ctrl-C does, with the process that plans and its files."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # others cannot set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        print("flextrain: interrupted", file=sys.stderr)  # noqa: T201
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGTERM, before)
