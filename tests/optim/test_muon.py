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
from flextrain.optim.matrices import check_roles, find_roles
from flextrain.optim.muon import Muon, newton_schulz
from flextrain.strategies import SingleDeviceStrategy

from ..runner.training import log_lines

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


def test_adapters_of_an_embedding_are_left() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["embed", "decode"])
    model = peft.get_peft_model(Net(), config)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = trained & {*names(model)}
    assert len(trained) == 4
    assert found == {name for name in trained if ".decode." in name}


def test_the_log_says_who_updates_what(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="flextrain")
    line = nn.Sequential(nn.Linear(4, 4, bias=False))
    for model, others in ((Net(), "AdamW"), (line, "AdamW"), (line, None)):
        check_roles(find_roles(model, "optimizer"), model, "optimizer", others)
    assert caplog.messages[0].startswith("Muon updates 5 parameters, AdamW the other ")
    assert caplog.messages[1:] == [
        "Muon updates every trained parameter (1); optimizer.others has none and may be left out",
        "Muon updates every trained parameter (1)",
    ]


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
    (dict(lr="0.02"), '.lr: "0.02" is not allowed, give a number or Tensor'),
    (dict(lr=True), ".lr: True is not allowed, give a number or Tensor"),
    (dict(lr=float("nan")), ".lr: nan is not allowed, give a finite number"),
    (dict(weight_decay=-0.1), ".weight_decay: -0.1 is not allowed, give 0 or more"),
    (dict(eps=-1.0), ".eps: -1.0 is not allowed, give 0 or more"),
    (dict(momentum=-0.1), ".momentum: -0.1 is not allowed, give 0 to below 1"),
    (dict(nesterov=1), ".nesterov: 1 is not allowed, give True or False"),
    (dict(ns_steps=True), ".ns_steps: True is not allowed, give an integer"),
    (dict(ns_steps=5.0), ".ns_steps: 5.0 is not allowed, give an integer"),
    (dict(ns_steps=100), ".ns_steps: 100 is not allowed, give 1 to 99"),
    (dict(ns_coefficients=3), ".ns_coefficients: 3 is not allowed, give a list"),
    (dict(ns_coefficients="abc"), '.ns_coefficients: "abc" is not allowed, give a list'),
    (dict(ns_coefficients=(1.0, 2.0, "3")), '.ns_coefficients[2]: "3" is not allowed, give a number'),
    (dict(ns_coefficients=(1.0, 2.0, float("nan"))), ".ns_coefficients: (1.0, 2.0, nan) is not allowed, give finite numbers"),
    (dict(ns_dtype=torch.float32), '.ns_dtype: torch.float32 is not allowed, choose "bfloat16", "float32" or "float64"'),
    (dict(bucket_mb=-1), ".bucket_mb: -1 is not allowed, give a number above 0"),
    (dict(bucket_mb="128"), '.bucket_mb: "128" is not allowed, give a number'),
    (dict(matrices="lm_head"), '.matrices: "lm_head" is not allowed, give a list'),
    (dict(matrices=None), ".matrices: None is not allowed, give a list"),
    (dict(matrices=["*"]), '.matrices: "*" names scale, which is a number, no matrix'),
    (dict(leave="lm_head"), '.leave: "lm_head" is not allowed, give a list'),
    (dict(leave=[3]), ".leave[0]: 3 is not allowed, give a string"),
    (dict(parts=["layers.*.qkv"]), ".parts: ['layers.*.qkv'] is not allowed, give a dict"),
    (dict(parts={"layers.*.qkv": 0}), '.parts["layers.*.qkv"]: 0 is not allowed, give a number of parts or a list of rows'),
    (dict(parts={"layers.*.qkv": True}), '.parts["layers.*.qkv"]: True is not allowed, give a number of parts'),
    (dict(parts={"layers.*.qkv": []}), '.parts["layers.*.qkv"]: [] is not allowed, give a number of parts'),
    (dict(parts={"layers.*.qkv": [25, -1]}), '.parts["layers.*.qkv"]: [25, -1] is not allowed, give a number of parts'),
    (dict(parts={"layers.*.qkv": dict(dim=1)}), '.parts["layers.*.qkv"]: None is not allowed, give a number of parts or a list of columns'),
    (dict(parts={"layers.*.qkv": 3, "*.0.qkv": 2}), '.parts["*.0.qkv"]: names layers.0.qkv.weight, which "layers.*.qkv" names too; give one of them'),
    (dict(parts={"layers.*.qkv.bias": 3}), '.parts["layers.*.qkv.bias"]: layers.0.qkv.bias is a vector, and not a matrix'),
    (dict(others=[]), ".others: [] is not allowed, give a dict or a string"),
    (dict(others="AdmaW"), '.others: "AdmaW" is no known optimizer, did you mean "AdamW"?'),
    (dict(others=dict(type="AdamW", betas=(2.0, 0.9))), ".others: Invalid beta parameter at index 0: 2.0"),
    (dict(others=dict(type="AdamW", lr=True)), ".others.lr: True is not allowed, give a number or Tensor"),
    (dict(other="AdamW"), '.other: unknown key, did you mean "others"?'),
    (dict(part_sizes=(3,)), '.part_sizes: unknown key, did you mean "parts"?'),
    (dict(fused=True), ".fused: unknown key, choose lr, weight_decay, momentum"),
    (dict(where="x"), ".where: is filled in by flextrain, leave it out"),
    (dict(type="Moun"), '.type: "Moun" is no known optimizer, did you mean "Muon"?'),
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
        ({}, dict(custom_keys={"layers": dict(momentum=3.0)}), "optim_wrapper.paramwise_cfg.custom_keys.layers.momentum: 3.0 is not allowed"),
        ({}, dict(custom_keys={"layers": dict(ns_steps=0)}), "optim_wrapper.paramwise_cfg.custom_keys.layers.ns_steps: 0 is not allowed"),
        ({}, dict(custom_keys={"layers": dict(eps=float("nan"))}), "optim_wrapper.paramwise_cfg.custom_keys.layers.eps: nan is not allowed"),
        ({}, dict(custom_keys={"embed": dict(betas=(2.0, 0.9))}), "optim_wrapper.paramwise_cfg.custom_keys.embed: Invalid beta parameter"),
        ({}, dict(custom_keys={"qkv": dict(parts=3)}), "optim_wrapper.paramwise_cfg.custom_keys.qkv.parts: unknown key, choose lr_mult"),
        ({}, dict(custom_keys={"qkv": dict(leave=["x"])}), "optim_wrapper.paramwise_cfg.custom_keys.qkv.leave: unknown key"),
        ({}, dict(custom_keys={"embed": dict(others="SGD")}), "optim_wrapper.paramwise_cfg.custom_keys.embed.others: unknown key"),
    ],
)  # fmt: skip
def test_wrong_settings_of_parameters(options: dict[str, Any], paramwise: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(Net(), paramwise, **options)
    assert str(caught.value).startswith(message)


def test_what_has_no_effect_is_told() -> None:
    model = Net()
    for part in (model.lm_head, model.layers[0].qkv):
        part.requires_grad_(False)
    keys = {
        "layers.0.out": dict(betas=(0.8, 0.9), lr_mult=0.5),
        "layers": dict(betas=(0.8, 0.9), momentum=0.8),  # of both
        "embed": dict(momentum=0.5, eps=1e-6),
    }
    with log_lines() as lines:
        built(model, dict(custom_keys=keys), matrices=["lm_head"], parts={"*.qkv": 3}, others=OTHERS)
    of_keys = "optim_wrapper.paramwise_cfg.custom_keys"
    assert sorted(lines) == [
        'optim_wrapper.optimizer.matrices: "lm_head" has no effect, it names only frozen parameters: lm_head.weight',
        'optim_wrapper.optimizer.parts: "*.qkv" has no effect, it names only frozen parameters: layers.0.qkv.weight',
        f"{of_keys}.embed.momentum: has no effect, AdamW updates every parameter that the key names, and has no momentum",
        f"{of_keys}.layers.0.out.betas: has no effect, Muon updates every parameter that the key names, and has no betas",
    ]


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)


NAMED = [dict(others="AdamW"), dict(matrices=["qkv"]), dict(leave=["qkv"]), dict(parts={"qkv": 3})]


@pytest.mark.parametrize("options", NAMED, ids=str)
@pytest.mark.parametrize("how", ["built", "function"])
def test_names_have_no_effect_without_a_model(how: str, options: dict[str, Any]) -> None:
    """An optimizer that is built of parameters, or by a function, does not know what they are called."""
    model, (key,) = Matrices(), options

    def make() -> object:
        if how == "built":
            return Muon(model.parameters(), **options)
        return SingleDeviceStrategy(device="cpu").setup(model, OptimWrapper(partial(Muon, lr=0.1, **options)))

    with pytest.raises(
        ConfigError, match=rf"^optimizer\.{key}: has no effect on parameters without the model that names them"
    ):
        make()


def test_parameters_that_muon_does_not_take() -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer: Muon updates real matrices, and a parameter is torch.float32 of shape"
    ):
        Muon(Net().parameters())
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])
    model = Matrices()
    model.rotation = nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64))
    assert names(model) == ["qkv.weight", "out.weight"]
    with pytest.raises(
        ConfigError, match=r'^optimizer.matrices: "rotation" names rotation, which is of complex numbers$'
    ):
        names(model, matrices=["rotation"])
