"""Train LoRA adapters beside the weights of a Hugging Face model, with small checkpoints, and write them in peft's format.

    python examples/fine_tuning.py --export work_dirs/reverses
    python examples/lora.py --pretrained work_dirs/reverses --export work_dirs/repeats
    torchrun --nproc-per-node 2 examples/lora.py --pretrained work_dirs/reverses --strategy fsdp
    torchrun --nproc-per-node 2 examples/lora.py --pretrained work_dirs/reverses --strategy zero3

The model of fine_tuning.py has learned to say words in reverse order; its adapters learn to repeat them in the same order. Without
--pretrained the base is a tiny Llama with random weights, from which adapters learn little. Needs pip install flextrain[peft].
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fine_tuning
from transformers import AutoModelForCausalLM, AutoTokenizer

from flextrain import FlexibleRunner
from flextrain.cli import main as command_line

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def strategy(name: str | None) -> dict[str, Any]:
    """Checkpoints have the adapters, without the base, which never changes."""
    if name is None:
        name = "ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "single"
    chosen = fine_tuning.strategy(name)
    chosen = chosen if isinstance(chosen, dict) else dict(type=chosen)
    return dict(**chosen, exclude_frozen_parameters=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = fine_tuning.parser_of(__doc__.splitlines()[0], "work_dirs/lora")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters' matrices")
    parser.add_argument("--target-modules", nargs="+", default=LAYERS, help="layers that get adapters")
    return parser.parse_args(arguments)


def make_runner(arguments: argparse.Namespace) -> FlexibleRunner:
    adapters = dict(
        type="LoRA", r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=arguments.target_modules
    )
    return fine_tuning.make_runner(
        arguments, backwards=False, transforms=[adapters], strategy=strategy(arguments.strategy)
    )


def check_export(arguments: argparse.Namespace) -> None:
    """Write the adapters of the last checkpoint, and let peft put them on their base."""
    from peft import PeftModel

    checkpoint = Path(arguments.work_dir, f"iter_{arguments.max_iters}")
    if command_line(["checkpoint", "export", str(checkpoint), str(arguments.export), "--peft"]):
        raise SystemExit(1)
    folder = fine_tuning.base_folder(arguments)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), arguments.export)
    said = fine_tuning.ask(model, AutoTokenizer.from_pretrained(folder), fine_tuning.WORDS[:3])
    print(f"{arguments.export} says: {said}")


def main() -> None:
    arguments = parse_arguments()
    runner = make_runner(arguments)
    runner.train()
    tokenizer = AutoTokenizer.from_pretrained(fine_tuning.base_folder(arguments))
    said = fine_tuning.ask(runner, tokenizer, fine_tuning.WORDS[:3])
    if runner.rank == 0:
        print(f"{fine_tuning.question(fine_tuning.WORDS[:3])} {said}")
        if arguments.export is not None:
            check_export(arguments)


if __name__ == "__main__":
    main()
