"""The table of machines, and machines in files."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from flextrain.cli import main
from flextrain.commands.list_names import machine_row
from flextrain.core.base.errors import ConfigError
from flextrain.plan.machines import DTYPES, MACHINES, Link, check_devices, machine_named, machine_of, nodes_for

H100 = MACHINES["h100"]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_every_figure_is_possible_and_has_a_source(machine):
    assert machine.sources.keys() == {"peak", "memory", "bandwidth", "devices"}
    assert all(machine.sources.values())
    assert machine.inside.source
    assert machine.between.source
    assert set(machine.peak) <= set(DTYPES)
    assert machine.peak["bfloat16"] >= machine.peak["float32"] >= machine.peak.get("float64", 0)
    rates = [*machine.peak.values(), machine.bandwidth, machine.inside.bytes_per_s, machine.between.bytes_per_s]
    assert all(math.isfinite(rate) and rate > 1e9 for rate in rates)
    assert machine.bandwidth > machine.inside.bytes_per_s > machine.between.bytes_per_s


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_an_entry_of_the_table_is_a_file_too(machine, tmp_path):
    (tmp_path / "own.json").write_text(json.dumps(dataclasses.asdict(machine)))
    assert machine_named(str(tmp_path / "own.json")) == machine


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("H100", "h100"),
        ("h100_pcie", "h100-pcie"),
        (" A100-80GB", "a100"),
        ("Ascend 910B", "910b"),
        ("mi300X", "mi300x"),
    ],
)
def test_names_have_no_case(given, name):
    assert machine_named(given).name == name


def test_rates_by_the_names_of_torch():
    assert H100.rate("bfloat16") == 989.4e12
    assert H100.rate("float8_e4m3fn") == 2 * H100.rate("float16") + 0.1e12
    assert H100.rate("tfloat32") > H100.rate("float32")
    assert MACHINES["cpu"].rate("tfloat32") == MACHINES["cpu"].rate("float32")
    assert MACHINES["a100"].rate("float8_e5m2") is None


def test_links_in_pairs_are_slower_to_few():
    link = Link("of seven", 448e9, 64e9)
    assert [link.speed(others) for others in (1, 3, 7, 15)] == [64e9, 192e9, 448e9, 448e9]
    assert H100.inside.speed(1) == H100.inside.speed(7)


def test_a_file_may_say_only_what_differs(tmp_path):
    file = tmp_path / "slow.json"
    file.write_text('{"like": "H100", "between": {"name": "Ethernet", "bytes_per_s": 12.5e9}, "memory": 1000}')
    found = machine_named(str(file))
    assert (found.name, found.peak, found.memory, found.between.bytes_per_s) == ("slow", H100.peak, 1000, 12.5e9)
    assert "memory" not in found.sources  # which is that of the other one
    assert found.sources["peak"] == H100.sources["peak"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"like": "h101"}, 'm.like: "h101" is not known, choose h100, .*, did you mean "h100"?'),
        ({"like": "h100", "bandwith": 1.0}, 'm.bandwith: unknown key, did you mean "bandwidth"?'),
        ({"like": "h100", "bandwidth": -1.0}, "m.bandwidth: -1.0 is not allowed"),
        ({"like": "h100", "bandwidth": float("inf")}, "m.bandwidth: inf is not allowed"),
        ({"like": "h100", "peak": {"bf16": 1e12}}, "m.peak.bf16: unknown key"),
        ({"like": "h100", "peak": {}}, "m.peak: is empty, give operations per second for float64, "),
        ({"like": "h100", "devices": 0}, "m.devices: 0 is not allowed"),
        ({"like": "h100", "between": {"bytes_per_s": 1e9}}, "m.between.name: missing"),
        ({"memory": 1}, 'm.peak: missing, give it, or "like" with the name of a machine'),
        ([], "m: .* is not allowed, give a dict"),
    ],
)
def test_a_wrong_machine_is_one_line(values, says):
    with pytest.raises(ConfigError, match=f"^{says}") as raised:
        machine_of(values, "own", "m")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("h10", 'plan.machine: "h10" is not known, choose h100, .*, did you mean "h100"?'),
        ("none.json", "plan.machine: none.json cannot be read, No such file"),
        ("", 'plan.machine: "" is not known'),
    ],
)
def test_a_name_that_is_not_known(given, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        machine_named(given)


def test_a_file_that_is_no_json(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json is no JSON, "):
        machine_named(str(tmp_path / "bad.json"))


def test_nodes_that_a_job_needs():
    assert [nodes_for(H100, world_size) for world_size in (1, 8, 16, 1024)] == [1, 1, 2, 128]
    with pytest.raises(
        ConfigError, match=r"plan\.nodes: missing, 12 processes do not fill nodes of 8 devices \(h100\)"
    ):
        nodes_for(H100, 12)
    check_devices(H100, 12, 3)
    with pytest.raises(ConfigError, match=r"plan\.nodes: 1 with 12 processes each is not allowed.*; give 2 or more"):
        check_devices(H100, 12, 1)


def test_the_command_lists_them(capsys):
    assert main(["list", "machines"]) == 0
    shown = capsys.readouterr().out
    assert all(machine.device.split(",")[0] in shown for machine in MACHINES.values())
    assert main(["list", "machines", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {name: dataclasses.asdict(one) for name, one in MACHINES.items()}
    assert main(["list", "machine"]) == 2
    assert 'did you mean "machines"?' in capsys.readouterr().err


def sources_of(machine):
    """The sources of a machine's figures, each with the figures that are from it."""
    figures = machine.sources | {"inside": machine.inside.source, "between": machine.between.source}
    found = {}
    for figure, source in figures.items():
        found.setdefault(source, []).append(figure)
    return "; ".join(f"{', '.join(names)}: {source}" for source, names in found.items())


def test_the_table_of_the_documentation_is_this_one():
    text = Path(__file__).parents[2].joinpath("docs", "planning_time.md").read_text(encoding="utf-8")
    for machine in MACHINES.values():
        assert f"| {' | '.join(machine_row(machine))} |\n" in text
        assert f"- `{machine.name}`: {sources_of(machine)}.\n" in text
