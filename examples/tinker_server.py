"""A server for clients of the Tinker API: each trains and samples a LoRA adapter of its own, on one base model and one worker group.

    python examples/tinker_server.py --port 8000
    torchrun --nproc-per-node 2 examples/tinker_server.py --port 8000 --use-fsdp
    torchrun --nproc-per-node 8 examples/tinker_server.py --model path/to/folder --dtype bfloat16 --rank 32 --use-fsdp

    import tinker
    service = tinker.ServiceClient(base_url="http://127.0.0.1:8000", api_key="tml-any")
    training = service.create_lora_training_client(base_model="tiny", rank=8).result()

It speaks HTTP as Thinking Machines' own client does, ``pip install tinker``, whose messages it takes from that package. Rank 0 serves,
checks requests and queues them; adapter_worker.py computes. Nobody has to log in: keep the address local. Without --model the base is a
tiny Llama with random weights. Needs pip install tinker fastapi uvicorn, flextrain[peft] and Python 3.11. docs/how_to/shared_base.md
says what is not served.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import queue
import re
import secrets
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from adapter_worker import Command, CommandError, Row, Worker, check, check_tokens
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError
from tinker import types
from tinker.proto import tinker_public_pb2 as wire
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flextrain.core.comm.collectives import is_main

KEPT = 1000
"""Finished results that are kept for clients that ask again."""
WAIT_S = 20.0
"""Seconds that a client is kept waiting for a result before it has to ask again."""
DTYPES = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64}


def served(request: Any, *names: str) -> None:
    """Raise ValueError for a field that has a value, and no effect here."""
    for name, field in type(request).model_fields.items():
        value = getattr(request, name)
        if name not in names and value and value != field.get_default(call_default_factory=True):
            raise ValueError(f"{name}: {value!r} is not served here, leave it out")


def rows_of(message: Any) -> list[Row]:
    """The texts of a ForwardBackwardRequest."""
    found = []
    for number, datum in enumerate(message.data):
        where = f"data[{number}]"
        if datum.model_input_spans or datum.loss_fn_input_spans:
            raise ValueError(f"{where}: spans are not served here, leave them out")
        if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in datum.model_input):
            raise ValueError(f"{where}.model_input: gives images or sounds, give tokens")
        row: Row = {"tokens": []}
        for chunk in datum.model_input:
            row["tokens"] += np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor.HasField("sparse_csr") or tensor.dtype not in DTYPES or len(tensor.shape) > 1:
                raise ValueError(f"{where}.loss_fn_inputs.{name}: give a dense list of float32 or int64")
            row[name] = np.frombuffer(tensor.dense, DTYPES[tensor.dtype]).tolist()
        found.append(row)
    return found


def protobuf(message: Any) -> Response:
    return Response(message.SerializeToString(), media_type="application/x-protobuf")


def as_output(found: dict[str, Any]) -> Response:
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": found["loss:sum"]})
    arrays = [values.numpy().astype(np.float32) for values in found["logprobs"]]
    field = message.loss_fn_outputs.add(num_datums=len(arrays)).fields["logprobs"]
    field.dtype, field.data = wire.DTYPE_FLOAT32, b"".join(values.tobytes() for values in arrays)
    field.offsets = np.cumsum([0, *(values.nbytes for values in arrays)]).astype(np.int64).tobytes()
    return protobuf(message)


def as_samples(found: list[tuple[list[int], list[float]]], ends: list[int]) -> Response:
    message = wire.SampleResponse()
    for tokens, logprobs in found:
        stops = bool(tokens) and tokens[-1] in ends
        message.sequences.add(
            stop_reason=wire.STOP_REASON_STOP if stops else wire.STOP_REASON_LENGTH,
            tokens=np.array(tokens, np.int32).tobytes(),
            logprobs=np.array(logprobs, np.float32).tobytes(),
        )
    return protobuf(message)


def application(worker: Worker, commands: queue.Queue[Command | None], base: str, work_dir: Path) -> FastAPI:
    """The routes: they check a request, put a command into the queue and return its number; ``retrieve_future`` gives the result."""
    app = FastAPI()
    results: dict[str, tuple[Command, Callable[[Any], Response]]] = {}
    sessions: set[str] = set()
    models: set[str] = set()
    samplers: dict[str, str | None] = {}  # paths by session

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return JSONResponse({"detail": f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"}, 422)

    @app.exception_handler(ValueError)
    async def refused(request: Request, error: ValueError) -> Response:
        return JSONResponse({"detail": " ".join(str(error).split())}, 400)

    def known(model_id: str | None) -> str:
        if model_id not in models:
            raise HTTPException(404, f"model_id: {model_id!r} is unknown, create it")
        return str(model_id)

    def folder(path: str | None) -> Path:
        parts = re.fullmatch(r"tinker://([\w:-]+)/((?:sampler_)?weights)/(\w[\w.-]*)", path or "")
        if parts is None or not (found := work_dir.joinpath(*parts.groups())).is_dir():
            raise HTTPException(404, f"path: {path!r} is unknown, save_state and save_weights_for_sampler return paths")
        return found

    def submit(
        number: str | None, answer: Callable[[Any], Response], call: str, adapter: str | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Queue a command; a client that has lost the reply sends it again, with the same number."""
        number = number or uuid.uuid4().hex
        command = Command(call, adapter, arguments)
        if number not in results:
            for old in [key for key, (each, _) in results.items() if each.future.done()][:-KEPT]:
                del results[old]
            results[number] = command, answer
            commands.put(command)
        elif (before := results[number][0]) != command:
            raise ValueError(f"seq_id: {number} was a request for {before.call} with other values, count on")
        return {"request_id": number, "model_id": adapter}

    def number_of(request: Any) -> str | None:
        return None if request.seq_id is None else f"{request.model_id}:{request.seq_id}"

    def as_json(**fields: Any) -> Callable[[Any], Response]:
        return lambda found: JSONResponse(fields)

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(request: types.FutureRetrieveRequest) -> Response:
        if request.request_id not in results:
            raise HTTPException(404, f"request_id: {request.request_id!r} is unknown")
        command, answer = results[request.request_id]
        try:
            return answer(await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(command.future)), WAIT_S))
        except asyncio.TimeoutError:
            return JSONResponse({"type": "try_again", "request_id": request.request_id, "queue_state": "active"})
        except CommandError as error:
            return JSONResponse({"error": str(error), "category": "user"})

    # Sessions

    @app.post("/api/v1/client/config")
    async def config() -> dict[str, Any]:
        return {"parallel_fwdbwd_chunks": False}  # parts of a request come in their order

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        model = {"model_name": base, "max_context_length": worker.longest, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    @app.post("/api/v1/create_session")
    async def create_session(request: types.CreateSessionRequest) -> dict[str, Any]:
        served(request, "sdk_version")
        sessions.add(session := uuid.uuid4().hex)
        return {"type": "create_session", "session_id": session}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(request: types.SessionHeartbeatRequest) -> dict[str, Any]:
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/telemetry")
    async def telemetry() -> dict[str, Any]:
        return {"status": "accepted"}

    @app.post("/api/v1/sessions/{session_id}/finish")
    async def finish(session_id: str) -> Response:
        ended = [name for name in models if name.startswith(f"{session_id}:")]
        models.difference_update(ended)
        commands.put(Command("forget", arguments={"adapters": ended}))
        return Response(status_code=204)

    # Training

    def create(session_id: str, model_seq_id: int) -> str:
        name = f"{session_id}:train:{model_seq_id}"
        if session_id not in sessions:
            raise HTTPException(404, f"session_id: {session_id!r} is unknown, create_session returns one")
        models.add(name)
        submit(f"{name}:create", as_json(type="create_model", model_id=name), "create", name)
        return name

    @app.post("/api/v1/create_model")
    async def create_model(request: types.CreateModelRequest) -> dict[str, Any]:
        served(request, "session_id", "model_seq_id", "base_model", "lora_config")
        check_base(request.base_model)
        if request.lora_config is None or request.lora_config != types.LoraConfig(rank=worker.rank):
            raise ValueError(f"lora_config: {request.lora_config} is not served here, give rank={worker.rank} alone")
        name = create(request.session_id, request.model_seq_id)
        return {"request_id": f"{name}:create", "model_id": name}

    def check_base(name: str | None) -> None:
        if name not in (None, base):
            raise ValueError(f'base_model: "{name}" is not served here, choose "{base}"')

    @app.post("/api/v1/get_info")
    async def get_info(request: types.GetInfoRequest) -> dict[str, Any]:
        data = {"arch": type(worker.engine.strategy.module).__name__, "model_name": base, "tokenizer_id": base}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": known(request.model_id),
            "is_lora": True,
            "lora_rank": worker.rank,
        }

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        try:
            message = wire.ForwardBackwardRequest.FromString(await request.body())
        except DecodeError:
            raise ValueError("forward_backward: give a message of tinker_public_pb2.ForwardBackwardRequest") from None
        name, rows, settings = known(message.model_id), rows_of(message), dict(message.loss_fn_config)
        if message.loss_fn_config_v2.keys() - settings.keys():
            raise ValueError("loss_fn_config: holds texts, give numbers")
        check(rows, message.loss_fn, settings, worker.vocabulary, worker.longest)
        arguments = dict(rows=rows, loss_fn=message.loss_fn, settings=settings, forward_only=message.forward_only)
        return submit(
            f"{name}:{message.seq_id}" if message.seq_id else None, as_output, "forward_backward", name, **arguments
        )

    @app.post("/api/v1/optim_step")
    async def optim_step(request: types.OptimStepRequest) -> dict[str, Any]:
        name, given = known(request.model_id), request.optim_params
        if not isinstance(given, types.AdamParams):
            raise ValueError(f"optim_params: {type(given).__name__} is not served here, give AdamParams")
        for key, value in given:
            if not (math.isfinite(value) and value >= 0) or (key.startswith("beta") and value >= 1):
                raise ValueError(
                    f"adam_params.{key}: {value} is not allowed, give 0 or more{', below 1' * key.startswith('beta')}"
                )
        arguments = dict(
            lr=given.learning_rate,
            betas=(given.beta1, given.beta2),
            eps=given.eps,
            weight_decay=given.weight_decay,
            clip=given.grad_clip_norm,
        )
        return submit(
            number_of(request),
            lambda norm: JSONResponse({"metrics": {"grad_norm": norm}}),
            "optim_step",
            name,
            **arguments,
        )

    # Checkpoints

    def save(request: Any, kind: str, path: str | None, **fields: Any) -> dict[str, Any]:
        if not re.fullmatch(r"\w[\w.-]*", path or ""):
            raise ValueError(f'path: {path!r} is not allowed, give letters, digits, "_", "." and "-"')
        uri, number = f"tinker://{known(request.model_id)}/{kind}/{path}", number_of(request)
        target = work_dir / request.model_id / kind / str(path)
        if target.exists() and number not in results and not getattr(request, "overwrite", False):
            raise ValueError(f"path: {uri} exists, give another name or overwrite=True")
        arguments = dict(path=str(target), meta=request.user_metadata)
        return submit(number, as_json(path=uri, **fields), "save", request.model_id, **arguments)

    @app.post("/api/v1/save_weights")
    async def save_weights(request: types.SaveWeightsRequest) -> dict[str, Any]:
        served(request, "model_id", "path", "seq_id", "overwrite", "user_metadata")
        return save(request, "weights", request.path, type="save_weights")

    @app.post("/api/v1/save_weights_for_sampler")
    async def save_weights_for_sampler(request: types.SaveWeightsForSamplerRequest) -> dict[str, Any]:
        served(request, "model_id", "path", "seq_id", "sampling_session_seq_id", "user_metadata")
        name = request.path or f"session-{request.sampling_session_seq_id}"
        session = None if request.path else f"{request.model_id}:sample:{request.sampling_session_seq_id}"
        reply = save(request, "sampler_weights", name, type="save_weights_for_sampler", sampling_session_id=session)
        if session:
            samplers[session] = f"tinker://{request.model_id}/sampler_weights/{name}"
        return reply

    @app.post("/api/v1/load_weights")
    async def load_weights(request: types.LoadWeightsRequest) -> dict[str, Any]:
        served(request, "model_id", "seq_id", "session_id", "model_seq_id", "base_model", "path", "optimizer")
        check_base(request.base_model)
        path = folder(request.path)
        if request.session_id is None:
            name, number = known(request.model_id), number_of(request)
        else:
            name = create(request.session_id, request.model_seq_id or 0)
            number = f"{name}:load"
        answer = as_json(type="load_weights", path=request.path, model_id=name)
        return submit(number, answer, "load", name, path=str(path), optimizer=request.optimizer)

    # Sampling

    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: types.CreateSamplingSessionRequest) -> dict[str, Any]:
        check_base(request.base_model)
        if request.model_path is not None:
            folder(request.model_path)
        session = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        samplers[session] = request.model_path
        return {"type": "create_sampling_session", "sampling_session_id": session}

    @app.get("/api/v1/samplers/{session}")
    async def get_sampler(session: str) -> dict[str, Any]:
        if session not in samplers:
            raise HTTPException(404, f"sampling_session_id: {session!r} is unknown, create it")
        return {"sampler_id": session, "base_model": base, "model_path": samplers[session]}

    @app.post("/api/v1/asample")
    async def asample(request: types.SampleRequest) -> dict[str, Any]:
        served(request, "num_samples", "prompt", "sampling_params", "sampling_session_id", "seq_id")
        given = request.sampling_params
        served(given, "max_tokens", "seed", "stop", "temperature")
        session = str(request.sampling_session_id)
        if session not in samplers:
            raise HTTPException(404, f"sampling_session_id: {session!r} is unknown, create it")
        prompt = request.prompt.to_ints()
        check_tokens(prompt, "prompt", worker.vocabulary, worker.longest - 1)
        ends = sorted(worker.ends) if given.stop is None else list(given.stop)
        if not all(isinstance(token, int) for token in ends):
            raise ValueError(f"sampling_params.stop: {given.stop!r} is not served here, give tokens")
        room = worker.longest - len(prompt)
        if not 1 <= (length := room if given.max_tokens is None else given.max_tokens) <= room:
            raise ValueError(f"sampling_params.max_tokens: {length} is not allowed, give 1 to {room} after this prompt")
        if not (math.isfinite(given.temperature) and given.temperature >= 0):
            raise ValueError(f"sampling_params.temperature: {given.temperature} is not allowed, give 0 or more")
        if request.num_samples < 1:
            raise ValueError(f"num_samples: {request.num_samples} is not allowed, give 1 or more")
        path = None if samplers[session] is None else str(folder(samplers[session]))
        number = None if request.seq_id is None else f"{session}:{request.seq_id}"
        seed = results[number][0].arguments["seed"] if given.seed is None and number in results else given.seed
        arguments = dict(
            path=path,
            prompt=prompt,
            samples=request.num_samples,
            length=length,
            temperature=given.temperature,
            seed=secrets.randbits(63) if seed is None else seed,
            ends=ends,
        )
        reply = submit(number, lambda found: as_samples(found, ends), "sample", None, **arguments)
        return {
            **reply,
            "sample_sequence_ids": [f"{reply['request_id']}:{each}" for each in range(request.num_samples)],
        }

    return app


# The program


def build_model(path: Path | None, dtype: torch.dtype) -> nn.Module:
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)  # type: ignore[no-any-return]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype)  # type: ignore[no-any-return]


def main(
    arguments: Sequence[str] | None = None, ready: Callable[[str, Callable[[], None]], None] | None = None
) -> None:
    """Serve until the program is ended; ``ready(address, stop)`` is called on rank 0, and ``stop()`` ends it on all processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--model", type=Path, help="folder of a causal language model; default: a tiny one with random weights"
    )
    parser.add_argument(
        "--dtype", choices=["float64", "float32", "bfloat16"], default="float32", help="of the base and adapters"
    )
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--micro-batch", type=int, default=8, help="texts that a process computes at a time")
    parser.add_argument(
        "--use-fsdp", action="store_true", help="every process holds a part of the model; default: one device or DDP"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument(
        "--work-dir", type=Path, default=Path("work_dirs/tinker"), help="for checkpoints; all processes see it"
    )
    given = parser.parse_args(arguments)
    model = build_model(given.model, getattr(torch, given.dtype))
    torch.manual_seed(0)  # of the adapters' first values
    options = dict(exclude_frozen_parameters=True)  # checkpoints are adapters
    name = "ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "single"
    strategy = dict(type="fsdp", wrap="blocks", **options) if given.use_fsdp else dict(type=name, **options)
    worker, commands = Worker(model, strategy, given.rank, given.micro_batch), queue.Queue[Command | None]()
    if is_main():
        base = "tiny" if given.model is None else given.model.name
        listening = socket.create_server((given.host, given.port))
        address = f"http://{given.host}:{listening.getsockname()[1]}"
        server = uvicorn.Server(
            uvicorn.Config(application(worker, commands, base, given.work_dir), log_level="warning")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        print(f"serving {base} at {address}", flush=True)
        if ready is not None:
            ready(address, lambda: commands.put(None))
    try:
        worker.run(commands)
    finally:
        if is_main():
            server.should_exit = True
            thread.join()
        worker.engine.close()


if __name__ == "__main__":
    main()
