"""Fine-tune all weights of a Hugging Face model, measure the text that it generates, and write a folder for from_pretrained.

    python examples/fine_tuning.py
    torchrun --nproc-per-node 2 examples/fine_tuning.py --strategy fsdp
    torchrun --nproc-per-node 2 examples/fine_tuning.py --strategy zero3 --export work_dirs/reverses
    python examples/fine_tuning.py --pretrained path/to/folder --export work_dirs/reverses

Without --pretrained the model is a tiny Llama with random weights, whose folder the script writes, with a tokenizer of a few words:
nothing is downloaded. It learns to say words in reverse order. Folders of other causal language models are taken alike.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flextrain import BaseMetric, FlexibleRunner

WORDS = ["red", "green", "blue", "black", "white", "brown", "pink", "grey", "gold", "lime"]
IGNORED = -100  # the label of what is no answer
LONGEST = 8  # tokens of an answer that are generated at most


def write_base(folder: Path) -> None:
    """Write the folder of a model, as save_pretrained does: weights, configuration, tokenizer.

    All processes may do it at the same time: the first complete folder is kept.
    """
    own = folder.with_name(f".{folder.name}.{os.getpid()}")
    tokenizer = trained_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(own)
    tokenizer.save_pretrained(own)
    try:
        own.rename(folder)
    except OSError:  # it is there
        shutil.rmtree(own)


def trained_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer = Tokenizer(models.WordLevel(unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=list(special.values()))
    tokenizer.train_from_iterator([question(WORDS)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def question(words: Sequence[str]) -> str:
    return f"reverse {' '.join(words)} :"


class Reversals(Dataset[dict[str, Tensor]]):
    """Questions with their answers: ``input_ids`` of both, and ``labels``, which leave out the question. Both (length,)."""

    def __init__(self, tokenizer: Any, length: int, first: int = 0, backwards: bool = True) -> None:
        self.tokenizer, self.length, self.first, self.backwards = tokenizer, length, first, backwards

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = random.Random(self.first + index)
        words = draw.sample(WORDS, draw.randint(2, 4))
        asked = self.tokenizer(question(words), add_special_tokens=False).input_ids
        said = words[::-1] if self.backwards else words
        answer = self.tokenizer(" " + " ".join(said), add_special_tokens=False).input_ids
        asked, answer = [self.tokenizer.bos_token_id, *asked], [*answer, self.tokenizer.eos_token_id]
        if asked[0] is None:  # a tokenizer that has no such token
            del asked[0]
        return {"input_ids": torch.tensor(asked + answer), "labels": torch.tensor([IGNORED] * len(asked) + answer)}


class Collate:
    """Pads texts on the right, where causal attention does not see it."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = [sample["input_ids"] for sample in samples]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.padding),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "labels": pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=IGNORED),
        }


class ExactMatch(BaseMetric):
    """Percentage of questions to which the model generates the answer, to its last token."""

    uses_model = True

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def process(self, data_batch: dict[str, Tensor], data_samples: Any) -> None:
        assert self.model is not None
        ids, labels = data_batch["input_ids"].cpu(), data_batch["labels"].cpu()
        begins = (labels != IGNORED).int().argmax(1).tolist()
        asked = prompts([row[:begin] for row, begin in zip(ids, begins, strict=True)], self.tokenizer)
        asked = {key: value.to(data_batch["input_ids"].device) for key, value in asked.items()}
        written = answers(self.model, asked, self.tokenizer).cpu()
        for row, label in zip(written, labels, strict=True):
            answer = label[label != IGNORED]
            self.results.append(torch.equal(row[: len(answer)], answer))

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"exact_match": 100 * sum(results) / len(results)}


def prompts(rows: Sequence[Tensor], tokenizer: Any) -> dict[str, Tensor]:
    """A batch to generate from. It is padded on the left, so that answers begin at once."""
    size = max(map(len, rows))
    ids = torch.stack(
        [torch.nn.functional.pad(row, (size - len(row), 0), value=tokenizer.pad_token_id) for row in rows]
    )
    mask = torch.stack([torch.arange(size) >= size - len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask}


def answers(model: Any, asked: dict[str, Tensor], tokenizer: Any) -> Tensor:
    """The tokens that follow those of ``asked``, (questions, up to LONGEST)."""
    options = dict(max_new_tokens=LONGEST, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    # A runner takes the inputs as one argument, because a process may have none.
    written: Tensor = (
        model.generate(asked, **options) if isinstance(model, FlexibleRunner) else model.generate(**asked, **options)
    )
    return written[:, asked["input_ids"].shape[1] :]


def strategy(name: str | None) -> Any:
    if name is None or not name.startswith(("fsdp", "mesh")):
        return name
    return dict(type=name, wrap="blocks")  # each layer is gathered when it computes


def parser_of(description: str, work_dir: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pretrained", type=Path, help="folder of a causal language model with its tokenizer")
    parser.add_argument("--strategy", help="ddp, fsdp, zero3, mesh:tp=2 and so on; default: one device or DDP")
    parser.add_argument("--max-iters", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="questions per process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where it is safe")
    parser.add_argument("--memory-limit", help='of the weights that generation gathers: "2GiB"')
    parser.add_argument("--work-dir", default=work_dir)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work-dir")
    parser.add_argument("--export", type=Path, help="write a folder for from_pretrained at the end")
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    return parser_of(__doc__.splitlines()[0], "work_dirs/fine_tuning").parse_args(arguments)


def base_folder(arguments: argparse.Namespace) -> Path:
    if arguments.pretrained is not None:
        return Path(arguments.pretrained)
    folder = Path(arguments.work_dir, "base")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        write_base(folder)
    return folder


def make_runner(arguments: argparse.Namespace, backwards: bool = True, **options: Any) -> FlexibleRunner:
    """The run; ``options`` are further ones of FlexibleRunner, or others than those here."""
    folder = base_folder(arguments)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token

    def dataloader(dataset: Dataset[Any], shuffle: bool) -> dict[str, Any]:
        return dict(
            batch_size=arguments.batch_size,
            dataset=dataset,
            sampler=dict(type="DefaultSampler", shuffle=shuffle),
            collate_fn=Collate(tokenizer.pad_token_id),
        )

    interval = min(50, arguments.max_iters)
    given: dict[str, Any] = dict(
        # Built without values; each process reads its own part of the folder's weights.
        model=dict(type="transformers:AutoModelForCausalLM", pretrained=str(folder)),
        work_dir=arguments.work_dir,
        strategy=strategy(arguments.strategy),
        train_dataloader=dataloader(Reversals(tokenizer, 4096, backwards=backwards), shuffle=True),
        optim_wrapper=dict(
            type="AmpOptimWrapper" if arguments.bf16 else "OptimWrapper",
            optimizer=dict(type="AdamW", lr=arguments.lr),
            clip_grad=dict(max_norm=1.0),
            accumulative_counts=arguments.accumulate,
            **(dict(dtype="bfloat16") if arguments.bf16 else {}),
        ),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=False, T_max=arguments.max_iters),
        train_cfg=dict(by_epoch=False, max_iters=arguments.max_iters, val_interval=interval),
        val_dataloader=dataloader(Reversals(tokenizer, 64, 1_000_000, backwards), shuffle=False),
        val_cfg=dict(memory_limit=arguments.memory_limit) if arguments.memory_limit else dict(),
        val_evaluator=[dict(type=ExactMatch, tokenizer=tokenizer), dict(type="Perplexity")],
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=interval, max_keep_ckpts=2, overwrite=True)
        ),
        randomness=dict(seed=0),
        resume=arguments.resume,
    )
    return FlexibleRunner(**{**given, **options})


def ask(model: Any, tokenizer: Any, words: Sequence[str]) -> str:
    """The answer in words of a model of Transformers, or of a runner, which all processes have to ask."""
    ids = torch.tensor(tokenizer(question(words), add_special_tokens=False).input_ids)
    if tokenizer.bos_token_id is not None:
        ids = torch.cat([torch.tensor([tokenizer.bos_token_id]), ids])
    return str(tokenizer.decode(answers(model, prompts([ids], tokenizer), tokenizer)[0], skip_special_tokens=True))


def main() -> None:
    arguments = parse_arguments()
    runner = make_runner(arguments)
    runner.train()
    tokenizer = AutoTokenizer.from_pretrained(base_folder(arguments))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    said = ask(runner, tokenizer, WORDS[:3])
    if runner.rank == 0:
        print(f"{question(WORDS[:3])} {said}")
    if arguments.export is not None:
        runner.export_hugging_face(arguments.export)
        if runner.rank == 0:
            exported = AutoModelForCausalLM.from_pretrained(arguments.export)
            print(
                f"{arguments.export} says: {ask(exported, AutoTokenizer.from_pretrained(arguments.export), WORDS[:3])}"
            )


if __name__ == "__main__":
    main()
