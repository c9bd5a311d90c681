"""What a strategy that a tool is asked for by name takes from the strategy of the user's script."""

import pytest

from flextrain import DDPStrategy, FSDPStrategy
from flextrain.core.base.errors import ConfigError
from flextrain.strategy_options import names_in, strategy_options

FSDP = dict(
    type="FSDPStrategy",
    prefetch=2,  # is possible with wrap only, whatever comes first
    wrap=["Block"],
    activation_checkpointing=dict(classes=["Block"]),
    mixed_precision=dict(param_dtype="bfloat16"),
)


def options(name, own):
    found, notes = strategy_options(name, {"strategy": own}, "cpu")
    assert found.pop("device") == "cpu"
    return found, notes


def test_a_mesh_takes_all_that_it_has_in_common_with_fsdp():
    found, notes = options("mesh:tp2", {**FSDP, "replicate_size": 2, "compile": True, "timeout_s": 5})
    assert {**found, "type": "FSDPStrategy"} == {**FSDP, "tp": 2}
    assert notes == [
        "strategy.replicate_size of the script's FSDPStrategy: left out, strategy.replicate_size: is FSDPStrategy's, give "
        "dp_replicate"
    ]


def test_what_is_said_by_name_comes_first():
    found, notes = options(dict(type="mesh", wrap="blocks"), FSDP)
    assert found["wrap"] == "blocks"
    assert notes == []


def test_an_option_that_another_one_makes_impossible_is_left_out():
    found, notes = options("mesh:dp1xtp2", dict(type="fsdp", reshard_after_forward=True))
    assert "reshard_after_forward" not in found
    assert notes[0].startswith("strategy.reshard_after_forward of the script's FSDPStrategy: left out, ")
    assert "has no effect with dp_replicate=1, dp_shard=1" in notes[0]


def test_options_of_the_same_name_may_be_others():
    found, notes = options("ddp", dict(type="fsdp", model_wrapper={}, activation_checkpointing=dict(classes=["A"])))
    assert found == {"type": DDPStrategy, "activation_checkpointing": {"classes": ["A"]}}
    assert notes == ["strategy.model_wrapper of the script's FSDPStrategy: left out, DDPStrategy has no such option"]


@pytest.mark.parametrize("name", ["fsdp", "mesh:tp2"])
def test_a_strategy_that_is_built_already_gives_its_options_too(name):
    found, notes = options(name, FSDPStrategy(wrap=["Block"], backend="gloo"))
    assert (found["wrap"], notes) == (["Block"], [])
    assert "backend" not in found


def test_its_own_class_gets_even_what_is_wrong():
    assert options("fsdp", dict(type="fsdp", wrp=1)) == ({"type": FSDPStrategy, "wrp": 1}, [])
    assert options("fsdp", None) == ({"type": FSDPStrategy}, [])


def test_names_with_commas():
    assert names_in(" ddp,mesh:tp2 ,", "plan.strategies") == ["ddp", "mesh:tp2"]
    with pytest.raises(ConfigError, match=r"^verify\.strategies: is empty, give names with commas between them$"):
        names_in(",", "verify.strategies")
