"""A BERT of transformers learns whether a review praises; the data is generated, the model begins at random."""

import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

from flextrain import BaseMetric, BaseModel
from flextrain import FlexibleRunner as Runner

WORDS = ["[PAD]", "the", "film", "plot", "was", "and", "superb", "lovely", "great", "dull", "awful", "poor"]
TONES = ([9, 10, 11], [6, 7, 8])


def reviews(count, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(words):
        return words[int(torch.randint(len(words), (), generator=generator))]

    for number in range(count):
        label = number % 2
        length = 4 + int(torch.randint(4, (), generator=generator))
        text = [draw(TONES[label] if position in (1, 3) else range(1, 6)) for position in range(length)]
        padding = [0] * (8 - length)
        mask = [1] * length + padding
        yield dict(label=label, input_ids=text + padding, token_type_ids=[0] * 8, attention_mask=mask)


class MMBertForClassify(BaseModel):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, label, input_ids, token_type_ids, attention_mask, mode):
        output = self.model(
            input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask, labels=label
        )
        if mode == "loss":
            return {"loss": output.loss}
        return output.logits, label


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        scores, labels = data_samples
        self.results.append({"size": len(labels), "right": (scores.argmax(dim=1) == labels).sum().cpu()})

    def compute_metrics(self, results):
        return dict(accuracy=100 * sum(r["right"] for r in results) / sum(r["size"] for r in results))


def collate_fn(data):
    return {key: torch.tensor([item[key] for item in data]) for key in data[0]}


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    size = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=8, num_labels=2, **size)
    train_loader = dict(
        batch_size=32,
        dataset=list(reviews(480, seed=0)),
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=collate_fn,
    )
    test_loader = dict(
        batch_size=32,
        dataset=list(reviews(70, seed=1)),
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=collate_fn,
    )
    runner = Runner(
        model=MMBertForClassify(BertForSequenceClassification(config)),
        train_dataloader=train_loader,
        val_dataloader=test_loader,
        optim_wrapper=dict(optimizer=dict(type=torch.optim.Adam, lr=2e-3)),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        val_cfg=dict(),
        work_dir="bert_work_dir",
        val_evaluator=dict(type=Accuracy),
        launcher=args.launcher,
        randomness=dict(seed=0),
    )
    runner.train()


if __name__ == "__main__":
    main()
