"""Muon on one device: torch's arithmetic, which parameters are matrices, and configurations that are refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from flextrain.core.base.errors import ConfigError
from flextrain.optim import OptimWrapper
from flextrain.optim.matrices import find_roles
from flextrain.optim.muon import Muon, newton_schulz
from flextrain.strategies import SingleDeviceStrategy

OTHERS = dict(type="AdamW", lr=1e-3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.heads = nn.ModuleList([nn.Linear(8, 4, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(torch.tanh(q * k) + v) + self.heads[0](x).repeat(1, 2)


class Experts(nn.Module):
    num_experts = 2

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.einsum("nd,edh->neh", x, self.up) ** 2).sum((1, 2), keepdim=True)[:, 0]


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.pos_embed = nn.Embedding(10, 8), nn.Parameter(torch.randn(3, 8))
        self.layers, self.experts = nn.ModuleList([Block()]), Experts()
        self.conv, self.scale = nn.Conv1d(8, 8, 1), nn.Parameter(torch.ones(()))
        self.decode, self.lm_head = nn.Linear(8, 10, bias=False), nn.Linear(8, 10, bias=False)
        if tied:
            self.decode.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.pos_embed[0]
        x = self.layers[0](x) + self.experts(x) + self.conv(x.unsqueeze(-1)).squeeze(-1)
        return (self.lm_head(x) + self.decode(x)) * self.scale


class Columns(nn.Module):
    """The network of Rows with each weight transposed: its outputs are columns."""

    is_transposed, num_experts = True, 2

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.wide = nn.Parameter(torch.randn(6, 24, generator=generator))
        self.experts = nn.Parameter(torch.randn(2, 24, 5, generator=generator))
        self.conv = nn.ConvTranspose1d(24, 3, 2, bias=False)
        self.gpt = Conv1D(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.wide).tanh()
        out = self.conv(hidden.unsqueeze(-1)).flatten(1)
        return out.sum() + sum(self.gpt(hidden @ expert).square().sum() for expert in self.experts)


class Rows(Columns):
    is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("wide", "experts"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach().mT.contiguous()))
        self.flat = nn.Parameter(self.conv.weight.detach().flatten(1).T.contiguous())
        self.linear = nn.Linear(5, 8)
        with torch.no_grad():
            self.linear.weight.copy_(self.gpt.weight.T)
            self.linear.bias.copy_(self.gpt.bias)
        del self.conv, self.gpt

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x @ self.wide.T).tanh()
        out = hidden @ self.flat.T
        return out.sum() + sum(self.linear(hidden @ expert.T).square().sum() for expert in self.experts)


@pytest.mark.parametrize("function", ["original", "spectral_unclamped", "match_rms_adamw"])
def test_a_transposed_layer_moves_as_the_other(function: Any) -> None:
    """Its outputs are columns: those of Conv1D in GPT-2, of stacks of experts that compute x @ W, of transposed convolutions."""
    pytest.importorskip("transformers")
    torch.manual_seed(2)
    model = Columns().double()
    torch.manual_seed(2)
    other = Rows().double()
    for each, matrices in ((model, ["conv"]), (other, [])):
        wrapper = built(each, adjust_lr_fn=function, ns_dtype="float64", matrices=matrices)
        for seed in range(3):
            x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            wrapper.update_params(each(x))
    same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    same(model.wide.T, other.wide)
    same(model.experts.mT, other.experts)
    same(model.gpt.weight.T, other.linear.weight)
    same(model.conv.weight.flatten(1).T, other.flat)


def test_experts_of_transformers_say_how_they_are_stored() -> None:
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.llama4 import modeling_llama4 as llama4
    from transformers.models.mixtral import modeling_mixtral as mixtral

    sizes = dict(num_hidden_layers=1, hidden_size=8, intermediate_size=4, num_local_experts=2)
    layers = {
        gpt_oss.GptOssExperts(gpt_oss.GptOssConfig(**sizes)): True,
        llama4.Llama4TextExperts(llama4.Llama4TextConfig(**sizes)): True,
        mixtral.MixtralExperts(mixtral.MixtralConfig(**sizes)): False,
    }
    for layer, expected in layers.items():
        roles = find_roles(layer, "optimizer")
        assert {role.transposed for role in roles.values() if role.stacked} == {expected}, type(layer)
        biases = [role.why_not for name, role in roles.items() if name.endswith("bias")]
        assert biases == ["a vector for each expert"] * (2 * isinstance(layer, gpt_oss.GptOssExperts))


def built(model: nn.Module, paramwise_cfg: dict[str, Any] | None = None, **options: Any) -> OptimWrapper:
    wrapper = OptimWrapper({"type": "Muon", "lr": 0.02, "others": OTHERS, **options}, paramwise_cfg=paramwise_cfg)
    SingleDeviceStrategy(device="cpu").setup(model, wrapper)
    return wrapper


def updated(optimizer: Any, model: nn.Module, updates: int = 4) -> list[Tensor]:
    for seed in range(updates):
        generator = torch.Generator().manual_seed(seed)
        model(torch.randn(32, 12, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(nesterov=False, momentum=0.5),
        dict(adjust_lr_fn="match_rms_adamw", ns_steps=3, ns_coefficients=(3.0, -4.0, 2.0)),
        dict(adjust_lr_fn="spectral_unclamped", weight_decay=0.0, eps=1e-3),
    ],
    ids=str,
)
def test_torch_s_arithmetic_to_the_bit(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 5, bias=False))
    other = copy.deepcopy(model)
    found = updated(Muon(model.parameters(), lr=0.02, **options), model)
    expected = updated(torch.optim.Muon(other.parameters(), lr=0.02, **options), other)
    assert all(map(torch.equal, found, expected))


def test_singular_values_come_near_one() -> None:
    matrix = torch.randn(20, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = newton_schulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.linalg.svdvals(found).sub(1).abs().max() < 0.4
    assert not newton_schulz(torch.zeros(3, 2), (3.0, -4.0, 2.0), 5, 1e-7).any()


def names(model: nn.Module, **rules: Any) -> list[str]:
    roles = find_roles(model, "optimizer", **rules)
    return [name for name, _ in model.named_parameters() if not roles[name].why_not]


def test_matrices_are_those_of_hidden_layers() -> None:
    own = ["layers.0.qkv.weight", "layers.0.out.weight", "layers.0.heads.0.weight", "experts.up"]
    assert names(Net()) == [*own, "decode.weight"]
    assert names(Net(tied=True)) == own
    assert names(Net(), leave=["layers.*", "decode"]) == ["experts.up"]
    assert names(Net(), matrices=["lm_head", "conv"]) == [*own, "conv.weight", "decode.weight", "lm_head.weight"]


class Unusual(nn.Module):
    """Parameters of two dimensions of layers that are no matrices, one of them held by a parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.layer = nn.Embedding(10, 8), nn.LayerNorm([4, 8]), nn.Linear(8, 8)
        for part in (self.words, self.layer):
            orthogonal(part, "weight", orthogonal_map="householder", use_trivialization=False)


def test_norms_and_parametrised_embeddings_are_no_matrices() -> None:
    assert names(Unusual()) == ["layer.parametrizations.weight.original"]


def test_a_head_that_a_model_of_transformers_names() -> None:
    model = Net()
    model.get_output_embeddings = lambda: model.decode  # type: ignore[assignment]
    assert "decode.weight" not in names(model)


def test_each_parameter_has_one_optimizer_and_its_settings() -> None:
    model = Net()
    keys = {"layers": dict(lr_mult=0.5, momentum=0.8), "embed": dict(lr_mult=2.0, betas=(0.8, 0.9))}
    wrapper = built(
        model, dict(custom_keys=keys, norm_decay_mult=0.0), weight_decay=0.1, others={**OTHERS, "weight_decay": 0.2}
    )
    found = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in wrapper.param_groups:
        for parameter in group["params"]:
            assert names[id(parameter)] not in found
            found[names[id(parameter)]] = group
    assert found.keys() == {*names.values()}
    assert found["layers.0.qkv.weight"]["lr"] == 0.01
    assert found["layers.0.qkv.weight"]["momentum"] == 0.8
    assert found["experts.up"]["lr"] == 0.02
    assert found["embed.weight"]["lr"] == 2e-3
    assert found["embed.weight"]["betas"] == (0.8, 0.9)
    assert found["lm_head.weight"]["lr"] == 1e-3
    assert found["lm_head.weight"]["weight_decay"] == 0.2
    assert "momentum" not in found["lm_head.weight"]


def stepped(wrapper: OptimWrapper, model: nn.Module, updates: int = 2) -> dict[str, Tensor]:
    for seed in range(updates):
        ids = torch.randint(10, (64,), generator=torch.Generator().manual_seed(seed))
        wrapper.update_params(model(ids).square().mean())
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_parts_and_experts_are_orthogonalised_apart() -> None:
    torch.manual_seed(0)
    model = Net()
    before = copy.deepcopy(model)
    after = stepped(built(model, parts={"layers.*.qkv": 3}, ns_dtype="float64", weight_decay=0.0), model, 1)
    for name, parts in {"layers.0.qkv.weight": 3, "experts.up": 2}.items():
        moved = (after[name] - before.get_parameter(name).detach()) / 0.02
        for part in moved.flatten(0, -2).chunk(parts):
            factor = max(1, part.shape[0] / part.shape[1]) ** 0.5
            values = torch.linalg.svdvals(part / factor)
            assert (
                values[:3].min() > 0.5
            )  # the smallest are near zero: a layer norm takes the mean of the inputs, and tokens are few
            assert values.max() < 1.4
    whole = Net()
    whole.load_state_dict(before.state_dict())
    apart = stepped(built(whole, ns_dtype="float64", weight_decay=0.0), whole, 1)["layers.0.qkv.weight"]
    assert (apart - after["layers.0.qkv.weight"]).abs().max() > 1e-3


def test_a_copy_and_a_state_dict_go_on_alike() -> None:
    torch.manual_seed(0)
    model = Net()
    wrapper = built(model, ns_dtype="float64")
    stepped(wrapper, model)
    other = copy.deepcopy(model)
    resumed = built(other, ns_dtype="float64", lr=0.5)
    resumed.load_state_dict(copy.deepcopy(wrapper.state_dict()))
    again, optimizer = copy.deepcopy((model, wrapper.optimizer))
    assert optimizer.others is not None
    assert optimizer.others.state is optimizer.state
    expected = stepped(wrapper, model)
    found = stepped(resumed, other)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(optimizer.state) == len(wrapper.optimizer.state)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in again.parameters()}


def test_frozen_parameters_need_no_other_optimizer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False))
    model[0].bias.requires_grad_(False)
    wrapper = built(model, others=None)
    assert sum(len(group["params"]) for group in wrapper.param_groups) == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(others=None), '.others: missing, Muon updates matrices and pos_embed is an embedding, like 8 others; give others=dict(type="AdamW", lr=...)'),
    (dict(others=5), '.others: 5 is not allowed, give a dict or a string'),
    (dict(others=dict(type="AdmaW")), '.others.type: "AdmaW" is no known optimizer, did you mean "AdamW"?'),
    (dict(others=dict(lr=0.1)), ".others.type: missing, say which optimizer"),
    (dict(others=dict(type="AdamW", lrr=0.1)), '.others.lrr: unknown key, did you mean "lr"?'),
    (dict(others=dict(type="AdamW", lr=-1.0)), ".others: Invalid learning rate: -1.0"),
    (dict(others=dict(type="AdamW", lr=float("nan"))), ".others.lr: nan is not allowed, give a finite number"),
    (dict(others=dict(type="AdamW", params=[])), ".others.params: is filled in by flextrain, leave it out"),
    (dict(others=dict(type="Muon")), ".others.type: Muon cannot update what is no matrix beside Muon, choose AdamW"),
    (dict(others=dict(type="LBFGS")), ".others: LBFGS evaluates the loss several times per update"),
    (dict(lr=-0.1), ".lr: -0.1 is not allowed, give 0 or more"),
    (dict(momentum=1.0), ".momentum: 1.0 is not allowed, give 0 to below 1"),
    (dict(ns_steps=0), ".ns_steps: 0 is not allowed, give 1 to 99"),
    (dict(ns_coefficients=(1.0, 2.0)), ".ns_coefficients: has 2 numbers, give three"),
    (dict(ns_dtype="float16"), '.ns_dtype: "float16" is not allowed, choose "bfloat16", "float32" or "float64"'),
    (dict(adjust_lr_fn="orignal"), '.adjust_lr_fn: "orignal" is not allowed, '),
    (dict(bucket_mb=0), ".bucket_mb: 0 is not allowed, give a number above 0"),
    (dict(parts={"layers.*.qvk.weight": 3}), '.parts: "layers.*.qvk.weight" names no parameter of the model, did you mean "layers.0.qkv.weight"?'),
    (dict(parts={"layers.*.qkv": 5}), '.parts["layers.*.qkv"]: layers.0.qkv.weight has 24 rows, which 5 does not divide'),
    (dict(parts={"layers.*.qkv": [8, 8]}), '.parts["layers.*.qkv"]: 8 + 8 is 16, and layers.0.qkv.weight has 24 rows'),
    (dict(parts={"layers.*.qkv": dict(sizes=2, axis=1)}), '.parts["layers.*.qkv"].axis: unknown key'),
    (dict(parts={"layers.*.qkv": dict(sizes=2, dim=2)}), '.parts["layers.*.qkv"].dim: 2 is not allowed, give 0 for rows or 1 for columns'),
    (dict(parts={"layers.*.qkv": "3"}), '.parts["layers.*.qkv"]: \'3\' is not allowed, give a number of parts or a list of rows'),
    (dict(parts={"embed": 2}), '.parts["embed"]: embed.weight is an embedding, and not a matrix that has parts'),
    (dict(matrices=["layers.0.norm.weight"]), '.matrices: "layers.0.norm.weight" names layers.0.norm.weight, which is of shape (8,), no matrix'),
    (dict(matrices=["lm_hed.weight"]), '.matrices: "lm_hed.weight" names no parameter of the model, did you mean "lm_head.weight"?'),
    (dict(matrices=["lm_head"], leave=["lm_*"]), '.leave: "lm_*" names lm_head.weight, which optim_wrapper.optimizer.matrices names too'),
    (dict(leave=["layers", "layers.*", "experts", "decode"]), '.leave: "layers" names no parameter of the model'),
    (dict(leave=["layers.*", "experts", "decode"]), ": Muon updates matrices, and Net trains none; choose AdamW"),
]  # fmt: skip


@pytest.mark.parametrize("options, message", WRONG, ids=[str(options) for options, _ in WRONG])
def test_wrong_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(Net(), **options)
    assert str(caught.value).startswith(f"optim_wrapper.optimizer{message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options, paramwise, message",
    [
        ({}, dict(custom_keys={"layers": dict(betaz=1)}), "optim_wrapper.paramwise_cfg.custom_keys.layers.betaz: unknown key"),
        (dict(others="AdamW"), dict(bias_lr_mult=2.0), "optim_wrapper.optimizer.others.lr: missing, paramwise_cfg multiplies it"),
    ],
)  # fmt: skip
def test_wrong_settings_of_parameters(options: dict[str, Any], paramwise: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(Net(), paramwise, **options)
    assert str(caught.value).startswith(message)
