"""Fine-tuning of a Llama to follow instructions, with a strategy and a loop of its own, without a runner."""

import argparse
import copy
import json
import logging
import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.data import default_data_collator
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from flextrain import FSDPStrategy, Visualizer
from flextrain.core.comm.collectives import is_main
from flextrain.core.device.device import to_device
from flextrain.optim.schedulers import StepLR
from flextrain.runner.data.samplers import DefaultSampler
from flextrain.runner.reporting import JsonLinesReporter

ORI_BATCH_SIZE = 4
PROMPTS = {True: "{instruction}: {input} = ", False: "{instruction} = "}
END = 0


class Tokenizer:
    """Characters by their numbers."""

    def encode(self, text):
        return [ord(character) % 64 for character in text]


class AlpacaDataset(Dataset):
    def __init__(self, data_path, tokenizer, max_words=20):
        self.ann = json.loads(Path(data_path).read_text())
        self.max_words, self.tokenizer = max_words, tokenizer

    def __len__(self):
        return len(self.ann)

    def __getitem__(self, index):
        ann = self.ann[index]
        prompt = PROMPTS[bool(ann.get("input"))].format_map(ann)
        example = torch.tensor([*self.tokenizer.encode(prompt + ann["output"]), END])[: self.max_words]
        mask = torch.arange(self.max_words) < len(example)
        example = torch.cat((example, example.new_zeros(self.max_words - len(example))))
        labels = copy.deepcopy(example)
        labels[: len(prompt)] = -100
        labels[~mask] = -100
        return {"input_ids": example, "labels": labels, "attention_mask": mask.float()}


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("data_root")
    parser.add_argument("--output-dir", default="work_dirs")
    parser.add_argument("--max-epoch", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--save-interval", type=int, default=12)
    return parser.parse_args()


def train():
    args = parse_args()
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, force=True)
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    strategy = FSDPStrategy(model_wrapper=dict(auto_wrap_policy=policy))
    strategy.join()
    visualizer = Visualizer(
        name="llama2", save_dir=args.output_dir, vis_backends=[dict(type=JsonLinesReporter)] if is_main() else []
    )
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **size))
    model.train()

    train_dataset = AlpacaDataset(args.data_root, Tokenizer())
    train_dataloader = DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        sampler=DefaultSampler(dataset=train_dataset, seed=0),
        collate_fn=default_data_collator,
        drop_last=True,
    )
    epoch_length = len(train_dataloader)
    max_iters = epoch_length * args.max_epoch
    optim_cfg = dict(
        optimizer=dict(type=AdamW, lr=1e-2, weight_decay=0.0), accumulative_counts=ORI_BATCH_SIZE / args.batch_size
    )
    scheduler_cfgs = [dict(type=StepLR, step_size=1, gamma=0.5)]
    model, optimizer, schedulers = strategy.prepare(
        model,
        optim_wrapper=optim_cfg,
        param_scheduler=scheduler_cfgs,
        dispatch_kwargs=dict(max_iters=max_iters, max_epochs=args.max_epoch),
    )
    for epoch in range(args.max_epoch):
        train_dataloader.sampler.set_epoch(epoch)
        for idx, inputs in enumerate(train_dataloader):
            cur_iter = epoch * epoch_length + idx + 1
            inputs = to_device(inputs, strategy.device)
            loss = model(**inputs)["loss"].mean()
            optimizer.update_params(loss)
            logging.info(f"Epoch: {epoch + 1}, Iter: {idx + 1}/{epoch_length}, Loss: {loss.item():.3f}")
            visualizer.add_scalars({"loss": loss.item(), "lr": optimizer.get_lr()["lr"][0]}, cur_iter)
            if cur_iter % args.save_interval == 0:
                options = StateDictOptions(full_state_dict=True, cpu_offload=True)
                state_dict = get_model_state_dict(model, options=options)
                if is_main():
                    model.save_pretrained(f"{args.output_dir}/iter_{cur_iter}", state_dict=state_dict)
        for scheduler in schedulers:
            scheduler.step()
    visualizer.close()
    strategy.leave()


if __name__ == "__main__":
    train()
