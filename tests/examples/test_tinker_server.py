"""examples/tinker_server.py: two clients of Thinking Machines' own package side by side are each as alone; what the server refuses."""

from __future__ import annotations

import importlib.util
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flextrain.core.checkpoint import Checkpoint
from flextrain.testing import WorkerGroup
from flextrain.testing.differences import same_tensors
from flextrain.testing.loop import alone

from .recipes import recipe

NEEDED = ("tinker", "fastapi", "uvicorn", "transformers", "peft")
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}: the extra examples has them"
)
TEXTS = [[(7 * text + 3 * at * at + text * at) % 64 for at in range(6 + text % 4)] for text in range(20)]


def served(flags: Sequence[str], drive: Callable[[str], Any] | None) -> Any:
    """What ``drive(address)`` returns while a server runs in this process; on ranks other than 0 the server alone."""
    found: list[Any] = []

    def call(address: str, stop: Callable[[], None]) -> None:
        try:
            assert drive is not None
            found.append(drive(address))
        except BaseException:
            found.append(traceback.format_exc())
        finally:
            stop()

    def ready(address: str, stop: Callable[[], None]) -> None:
        threading.Thread(target=call, args=(address, stop), daemon=True).start()

    recipe("tinker_server").main(("--port", "0", "--dtype", "float64", "--rank", "4", *flags), ready)
    return found[0] if found else None


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def service(address: str) -> Any:
    import os

    os.environ["TINKER_TELEMETRY"] = "0"  # in workers too
    import tinker

    return tinker.ServiceClient(base_url=address, api_key="tml-test")


def client(of: Any) -> Any:
    return of.create_lora_training_client(base_model="tiny", rank=4).result()


def datum(tokens: Sequence[int], **inputs: Any) -> Any:
    from tinker import types

    weights = [1 + at % 2 for at in range(len(tokens) - 1)]
    # As clients send them: floats, or a tensor of integers.
    whole = types.TensorData(data=weights, dtype="int64", shape=[len(weights)])
    given = inputs or {"weights": whole if len(weights) % 2 else [float(each) for each in weights]}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), **given},
    )


def adam(**settings: float) -> Any:
    from tinker import types

    return types.AdamParams(**settings)


class First:
    """Learns texts, in updates of one or two requests."""

    def __init__(self, of: Any) -> None:
        self.training, self.losses = client(of), list[float]()

    def turn(self, n: int) -> None:
        result = self.training.forward_backward([datum(text) for text in TEXTS[n : n + 5]], "cross_entropy").result()
        self.losses.append(result.metrics["loss:sum"])
        if n % 2:
            self.training.optim_step(adam(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0, eps=1e-8)).result()


class Second:
    """Learns from rewards of its own samples' log-probabilities, with another learning rate and other momenta."""

    def __init__(self, of: Any) -> None:
        self.training, self.losses = client(of), list[float]()

    def turn(self, n: int) -> None:
        texts = TEXTS[10 + n : 13 + n]
        rows = [
            datum(
                text, logprobs=[-4.0] * (len(text) - 1), advantages=[float(1 - at % 3) for at in range(len(text) - 1)]
            )
            for text in texts
        ]
        loss = "ppo" if n % 2 else "importance_sampling"
        self.losses.append(self.training.forward_backward(rows, loss).result().metrics["loss:sum"])
        self.training.optim_step(adam(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8)).result()


TURNS = (0, 1, 1, 0, 0, 1, 0)


def trained(address: str, turns: Sequence[int]) -> list[tuple[list[float], str]]:
    """Losses of the clients that have turns, and the paths of their checkpoints."""
    with service(address) as of:
        clients = {which: (First, Second)[which](of) for which in sorted(set(turns))}
        counts = dict.fromkeys(clients, 0)
        for which in turns:
            clients[which].turn(counts[which])
            counts[which] += 1
        return [(each.losses, each.training.save_state("end").result().path) for each in clients.values()]


def tensors(folder: Path, uri: str) -> dict[str, Tensor]:
    """Adapters and moments of a checkpoint."""
    checkpoint = Checkpoint.open(folder / uri.removeprefix("tinker://"))
    found = {key: torch.empty(info.shape, dtype=info.dtype) for key, info in checkpoint.tensors.items()}
    checkpoint.load(found)
    return found


Ends = list[tuple[list[float], dict[str, Tensor]]]


def ends(folder: Path, turns: Sequence[int], *flags: str) -> Ends:
    found = served(("--work-dir", str(folder), "--micro-batch", "2", *flags), lambda address: trained(address, turns))
    assert not isinstance(found, str), found
    return [(losses, tensors(folder, uri)) for losses, uri in found or ()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Each client alone on its own server."""
    folder = tmp_path_factory.mktemp("alone")
    with alone():
        return [ends(folder, [which] * TURNS.count(which))[0] for which in (0, 1)]


def compare(found: Ends, expected: Ends, tolerance: float) -> None:
    for (losses, state), (own_losses, own_state) in zip(found, expected, strict=True):
        assert losses == pytest.approx(own_losses, rel=tolerance, abs=tolerance)
        assert losses[-1] != losses[0]
        assert state.keys() == own_state.keys()
        assert all("lora_" in key for key in state if key.startswith("model."))
        assert any(key.startswith("optim.state.") for key in state)
        same_tensors(state, own_state, "adapter and moments", tolerance)


def test_two_clients_side_by_side_are_each_as_alone(tmp_path: Path, expected: Ends) -> None:
    with alone():
        compare(ends(tmp_path, TURNS), expected, 0)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("flags", [("--use-fsdp",), ()])
def test_two_clients_on_two_processes(
    tmp_path: Path, workers2: WorkerGroup, expected: Ends, flags: tuple[str, ...]
) -> None:
    compare(workers2.run(ends, tmp_path, TURNS, *flags)[0], expected, 1e-10)


def sampled(address: str) -> Any:
    from tinker import types

    with service(address) as of:
        one = First(of)
        one.turn(1)
        prompt = types.ModelInput.from_ints(TEXTS[0])

        def sample(of_whom: Any, **settings: Any) -> list[tuple[list[int], list[float]]]:
            made = of_whom.sample(prompt, 2, types.SamplingParams(max_tokens=5, **settings)).result()
            return [(list(each.tokens), list(each.logprobs), each.stop_reason) for each in made.sequences]

        before = one.training.save_weights_and_get_sampling_client().result()
        base = of.create_sampling_client(base_model="tiny").result()
        greedy = sample(before, temperature=0.0)
        tokens = greedy[0][0]
        text = [*TEXTS[0], *tokens]
        given = one.training.forward([datum(text)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        one.turn(3)
        path = one.training.save_state("later").result().path
        later = of.create_sampling_client(model_path=path).result()
        stopped = sample(before, temperature=0.0, stop=[tokens[1]])
        newer = sample(later, temperature=0.0)
        one.turn(5)
        one.training.save_state("later", overwrite=True).result()
        return {
            "later": newer,
            "overwritten": sample(later, temperature=0.0),
            "greedy": greedy,
            "again": sample(before, temperature=0.0),
            "of the training": list(given[-5:]),
            "seeded": [sample(before, seed=seed, temperature=1.5) for seed in (1, 1, 2)],
            "base": sample(base, temperature=0.0),
            "stopped": stopped,
        }


def check_samples(found: Any) -> None:
    assert not isinstance(found, str), found
    assert found["greedy"][0] == found["greedy"][1] == found["again"][0], (
        "the training has gone on, the sampler has not"
    )
    tokens, logprobs, reason = found["greedy"][0]
    assert (len(tokens), reason) == (5, "length")
    assert logprobs == pytest.approx(found["of the training"], abs=1e-5)
    first, again, other = found["seeded"]
    assert first == again != other
    assert first[0] != first[1]
    assert found["greedy"][0][1] != found["base"][0][1]
    assert found["greedy"][0][1] != found["later"][0][1]
    assert found["later"][0][1] != found["overwritten"][0][1]
    assert found["stopped"][0][0] == tokens[: tokens.index(tokens[1]) + 1]
    assert found["stopped"][0][2] == "stop"


@pytest.mark.full
def test_samples_are_of_the_weights_that_were_saved(tmp_path: Path) -> None:
    with alone():
        check_samples(served(("--work-dir", str(tmp_path)), sampled))


def resumed(address: str) -> Any:
    with service(address) as of:
        one = First(of)
        for n in range(2):
            one.turn(n)
        path = one.training.save_state("middle").result().path
        for n in range(2, 4):
            one.turn(n)
        found = []
        for kept in (True, False):
            make = "create_training_client_from_state" + "_with_optimizer" * kept
            other = First(of)
            made = getattr(of, make)(path)
            other.training = made.result() if hasattr(made, "result") else made
            for n in range(2, 4):
                other.turn(n)
            other.turn(4)
            found.append(other.losses)
        one.turn(4)
        return one.losses, found


@pytest.mark.full
def test_a_saved_client_goes_on(tmp_path: Path) -> None:
    with alone():
        found = served(("--work-dir", str(tmp_path)), resumed)
    assert not isinstance(found, str), found
    losses, (with_moments, without) = found
    assert with_moments == losses[2:]
    assert without[:2] == losses[2:4], "the weights are the same, up to the first update"
    assert without[2] != losses[4]


def refused(address: str) -> Any:
    """What the server says to wrong requests, and the losses of a client before, between and after them."""
    import httpx
    from tinker import types

    post = httpx.Client(base_url=address, timeout=60).post
    with service(address) as of:
        one, said, losses = client(of), [], []

        def tell(call: Callable[[], Any]) -> None:
            try:
                call().result()
                said.append("nothing")
            except Exception as error:
                said.append(str(error))
            result = one.forward([datum(TEXTS[0])], "cross_entropy").result()
            losses.append(result.metrics["loss:sum"])

        good = datum(TEXTS[0])
        nan = datum([1, 2, 3], weights=[1.0, float("nan")])
        far = datum([1, 2, 3], logprobs=[-4.0, -1e4], advantages=[1.0, 1.0])
        for data, loss, settings in (
            ([good], "dro", None),
            ([good], "ppo", None),
            ([datum([1, 3, 64])], "cross_entropy", None),
            ([datum([1, -2, 3])], "cross_entropy", None),
            ([nan], "cross_entropy", None),
            ([datum([1, 2, 3], weights=[1.0])], "cross_entropy", None),
            ([datum([1] * 200)], "cross_entropy", None),
            ([good], "cross_entropy", {"clip": 0.1}),
            ([far], "importance_sampling", None),
        ):
            tell(lambda data=data, loss=loss, settings=settings: one.forward_backward(data, loss, settings))  # type: ignore[misc]
        tell(lambda: one.optim_step(adam(learning_rate=1e-2)))
        for call in (
            lambda: of.create_lora_training_client(base_model="tiny", rank=5),
            lambda: of.create_lora_training_client(base_model="tiny", rank=4, seed=3),
            lambda: of.create_lora_training_client(base_model="large", rank=4),
            lambda: of.create_training_client_from_state("tinker://a/weights/b"),
            lambda: of.create_sampling_client(model_path="tinker://../weights/b"),
        ):
            tell(call)
        one = client(of)
        one.forward_backward([good], "cross_entropy").result()
        tell(lambda: one.save_state("early"))
        sampler = client(of).save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([1, 2])
        for settings in (dict(top_k=3), dict(stop=["a"]), dict(max_tokens=500), dict(temperature=-1.0)):
            tell(lambda settings=settings: sampler.sample(prompt, 1, types.SamplingParams(**settings)))  # type: ignore[misc]
    raw = [
        post("/api/v1/forward_backward", content=b"\xff"),
        post("/api/v1/optim_step", json={"model_id": "nobody", "adam_params": {}}),
        post("/api/v1/optim_step", json={"model_id": "nobody", "adam_params": {"momentum": 1}}),
        post("/api/v1/retrieve_future", json={"request_id": "nothing"}),
    ]
    return said, losses, [(each.status_code, each.json()["detail"]) for each in raw]


SAID = [
    'loss_fn: "dro" is not served, choose cross_entropy, importance_sampling, ppo',
    "has target_tokens, weights, ppo needs target_tokens, logprobs, advantages",
    "target_tokens: 64 is no token, give 0 to 63",
    "-2 is no token",
    "data[0].loss_fn_inputs.weights: holds NaN or infinity",
    "weights: has 1 values for 2 tokens",
    "has 199 tokens, give 1 to 128",
    'cross_entropy has no "clip"',
    "importance_sampling is -inf, its gradients were not added",
    "there are no gradients, call forward_backward() first",
    "give rank=4 alone",
    "give rank=4 alone",
    '"large" is not served here, choose "tiny"',
    "'tinker://a/weights/b' is unknown",
    "is unknown",
    "there are gradients, call optim_step()",
    "top_k: 3 is not served here",
    "give tokens",
    "max_tokens: 500 is not allowed, give 1 to 126",
    "temperature: -1.0 is not allowed",
]


def check_refused(found: Any) -> None:
    assert not isinstance(found, str), found
    said, losses, raw = found
    for message, expected in zip(said, SAID, strict=True):
        assert expected in message
        assert "\n" not in message
    assert set(losses) == {losses[0]}
    assert [status for status, _ in raw] == [400, 404, 422, 404]
    assert all("\n" not in detail for _, detail in raw)
    assert "nobody" in raw[1][1]


def test_a_wrong_request_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    with alone():
        check_refused(served(("--work-dir", str(tmp_path)), refused))


def both(folder: Path) -> tuple[Any, Any]:
    """On two processes, what is refused, and then samples, of one server."""
    return served(
        ("--work-dir", str(folder), "--use-fsdp"),
        lambda address: (refused(address), sampled(address), refused(address)),
    )


@pytest.mark.full
@pytest.mark.distributed
def test_processes_stay_in_step_after_errors(tmp_path: Path, workers2: WorkerGroup) -> None:
    found = workers2.run(both, tmp_path)[0]
    assert not isinstance(found, str), found
    before, samples, after = found
    check_refused(before)
    check_samples(samples)
    check_refused(after)
