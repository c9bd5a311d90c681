"""A T5 of transformers translates; prediction is generation, and the metric compares sequences of words."""

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

from flextrain import BaseMetric, BaseModel
from flextrain import FlexibleRunner as Runner

ENGLISH = ["one", "two", "three", "four", "five", "six"]
FRENCH = ["un", "deux", "trois", "quatre", "cinq", "six_"]
PAD, END = 0, 1
NUMBERS = {word: number for number, word in enumerate([*ENGLISH, *FRENCH], start=2)}


def books(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        word, times = (int(torch.randint(high, (), generator=generator)) for high in (len(ENGLISH), 3))
        yield {"en": " ".join([ENGLISH[word]] * (times + 1)), "fr": " ".join([FRENCH[word]] * (times + 1))}


def tokenize(texts):
    sequences = [[*(NUMBERS[word] for word in text.split()), END] for text in texts]
    longest = max(map(len, sequences))
    return torch.tensor([[*sequence, *[PAD] * (longest - len(sequence))] for sequence in sequences])


def decode(sequence):
    return [int(number) for number in sequence if number > END]


class MMT5ForTranslation(BaseModel):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, label, input_ids, attention_mask, mode):
        if mode == "loss":
            return {"loss": self.model(input_ids=input_ids, attention_mask=attention_mask, labels=label).loss}
        return self.model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=5), label


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        outputs, labels = data_samples
        for output, label in zip(outputs, labels, strict=True):
            found, expected = decode(output), decode(label)
            right = sum(a == b for a, b in zip(found, expected, strict=False))
            self.results.append({"gen_len": len(found), "right": right / len(expected)})

    def compute_metrics(self, results):
        return {key: np.mean([item[key] for item in results]) for key in ("gen_len", "right")}


def collate_fn(data):
    input_ids, label = (tokenize([item[language] for item in data]) for language in ("en", "fr"))
    label[label == PAD] = -100  # does not count in the loss
    return dict(label=label, input_ids=input_ids, attention_mask=(input_ids != PAD).long())


def main():
    size = dict(d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, dropout_rate=0.0)
    config = T5Config(
        vocab_size=len(NUMBERS) + 2, decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=END, **size
    )
    train_loader = dict(
        batch_size=16,
        dataset=list(books(480, seed=0)),
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=collate_fn,
    )
    test_loader = dict(
        batch_size=32,
        dataset=list(books(40, seed=1)),
        sampler=dict(type="DefaultSampler", shuffle=False),
        collate_fn=collate_fn,
    )
    runner = Runner(
        model=MMT5ForTranslation(T5ForConditionalGeneration(config)),
        train_dataloader=train_loader,
        val_dataloader=test_loader,
        optim_wrapper=dict(optimizer=dict(type=torch.optim.Adam, lr=1e-2)),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        val_cfg=dict(),
        work_dir="t5_work_dir",
        val_evaluator=dict(type=Accuracy),
        randomness=dict(seed=0),
    )
    runner.train()


if __name__ == "__main__":
    main()
