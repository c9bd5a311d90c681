"""Orders, packed sequences and mixtures: pure functions of the position, each sample once, found with few reads."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flextrain import ConfigError
from flextrain.data import DataError, JsonlFiles, Mixture, PackedTokens, TokenFiles
from flextrain.runner import DefaultSampler, InfiniteSampler
from flextrain.runner.data.dataset_wrappers import ConcatDataset, RepeatDataset
from flextrain.runner.data.stream_orders import LocalOrder
from flextrain.runner.data.streams import packing as document_index
from flextrain.runner.data.streams.mixture import MixtureSchedule
from flextrain.runner.data.streams.packing import GROUP, DocumentIndex, ends_of_groups

Documents = list[list[int]]


def documents(count: int, seed: int = 0) -> Documents:
    """Documents of 0 to 9 tokens; every token of all of them is another number."""
    lengths = np.random.RandomState(seed).randint(0, 10, count)
    numbers = iter(range(1, int(lengths.sum()) + 1))
    return [[next(numbers) for _ in range(length)] for length in lengths]


def tokens_of(dataset: Any, indices: Any) -> list[int]:
    return list(chain.from_iterable(dataset[int(index)]["input_ids"].tolist() for index in indices))


# Orders


@pytest.mark.parametrize("sizes", [[1], [5], [3, 1, 1, 7, 2, 9, 4, 4, 1], [100] * 9 + [3]])
def test_local_order(sizes: list[int]) -> None:
    """Every sample once; in any four blocks that come one after the other, and by position as a whole."""
    ends = np.cumsum(sizes)
    order = LocalOrder(ends, 3, 1)
    whole = order[np.arange(ends[-1])]
    assert sorted(whole.tolist()) == list(range(ends[-1]))
    some = np.random.RandomState(1).randint(0, ends[-1], 50)
    assert (LocalOrder(ends, 3, 1)[some] == whole[some]).all()
    blocks = np.searchsorted(ends, whole, side="right")
    begin = 0
    while begin < len(blocks):
        group = set(blocks[begin:].tolist()[: 4 * max(sizes)])
        own = list(dict.fromkeys(blocks[begin:].tolist()))[:4]
        size = sum(sizes[block] for block in own)
        assert set(blocks[begin : begin + size].tolist()) == set(own) <= group
        begin += size
    if len(sizes) > 4:
        assert len(set(blocks[: max(sizes)].tolist())) > 1  # mixed, not block after block
        assert LocalOrder(ends, 3, 2)[np.arange(ends[-1])].tolist() != whole.tolist()


def test_local_order_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"{number}\n" for number in range(100)))
    source = JsonlFiles(tmp_path, local_shuffle=10)
    order = source.order_of_pass(0, 0, True)[np.arange(100)].tolist()
    assert sorted(order) == list(range(100))
    assert len({index // 10 for index in order[:40]}) == 4


@pytest.mark.parametrize("shuffle", [True, False])
def test_samplers_follow_the_order_of_a_dataset(shuffle: bool) -> None:
    """Pass by pass, with the sampler's seed, dealt in turn."""
    mixture = Mixture(SOURCES, [1, 1, 1])
    passes = [mixture.order_of_pass(9, number, shuffle)[np.arange(58)].tolist() for number in range(3)]
    sampler = DefaultSampler(mixture, shuffle=shuffle, seed=9, shard=(1, 2))
    sampler.set_epoch(2)
    assert list(sampler) == passes[2][1::2]
    endless = InfiniteSampler(mixture, shuffle=shuffle, seed=9, shard=(1, 3))
    assert list(islice(endless, 58)) == list(chain(*passes))[1::3]


# Mixtures


@pytest.mark.parametrize(
    "weights",
    [[1.0], [0.7, 0.2, 0.1], [1e-6, 1.0], [1, 1], [3, 1, 4, 1, 5, 9, 2, 6] * 4],
    ids=lambda weights: len(weights),
)
def test_schedule(weights: list[float]) -> None:
    """Shares hold to one sample per source at any time, counts have no gap, and any position gives what a whole run gives."""
    schedule, share = MixtureSchedule(weights, 7), np.array(weights) / sum(weights)
    sources, numbers = schedule.at(0, 5000)
    for source in range(len(weights)):
        assert (numbers[sources == source] == np.arange((sources == source).sum())).all()
        so_far = np.cumsum(sources == source)
        assert abs(so_far - np.arange(1, 5001) * share[source]).max() < 2 + len(weights) * share[source]
    for start in (0, 1, 2, 999, 4321):
        found = MixtureSchedule(weights, 7).at(start, start + 100)
        assert (found[0] == sources[start : start + 100]).all()
        assert (found[1] == numbers[start : start + 100]).all()
        assert schedule.counts(start) == [int((sources[:start] == i).sum()) for i in range(len(weights))]


def test_no_process_has_one_source() -> None:
    """Two sources of one weight do not take turns in step with two processes."""
    sources, _ = MixtureSchedule([1, 1], 0).at(0, 1000)
    assert all(150 < sources[process::2].sum() < 350 for process in range(2))


def test_schedule_far_away() -> None:
    sources, numbers = MixtureSchedule([1e-3, 5, 100], 0).at(10**11, 10**11 + 70_000)
    near = MixtureSchedule([1e-3, 5, 100], 0).at(10**11 + 69_990, 10**11 + 70_000)
    assert (near[0] == sources[-10:]).all()
    assert (near[1] == numbers[-10:]).all()


SOURCES = [list(range(7)), list(range(100, 150)), [900]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_mixture_without_weights_has_every_sample_once(shuffle: bool) -> None:
    mixture = Mixture(SOURCES)
    passes = [[mixture[i] for i in mixture.order_of_pass(3, n, shuffle)[np.arange(58)].tolist()] for n in range(4)]
    for samples in passes:
        assert sorted(samples) == sorted(chain(*SOURCES))
    assert (passes[0] != passes[1]) or not shuffle


def test_mixture_by_weights() -> None:
    """Each source's samples come pass by pass, across the passes of the mixture."""
    mixture = Mixture(SOURCES, [2, 1, 1])
    seen = [mixture[i] for n in range(8) for i in mixture.order_of_pass(3, n, True)[np.arange(58)].tolist()]
    counts = Counter(min(sample // 100, 2) for sample in seen)
    assert all(abs(counts[source] - 8 * 58 * share) <= 1 for source, share in ((0, 0.5), (1, 0.25), (2, 0.25)))
    small = [sample for sample in seen if sample < 7]
    passes = [small[begin : begin + 7] for begin in range(0, len(small) - 6, 7)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len({tuple(each) for each in passes}) > len(passes) // 2
    large = [sample for sample in seen if 100 <= sample < 900]
    assert sorted(large[:50]) == list(range(100, 150))
    assert mixture.counts(8 * 58, seed=3) == [counts[0], counts[1], counts[2]]


def test_sources_of_one_length_have_orders_of_their_own() -> None:
    mixture = Mixture([list(range(20)), list(range(100, 120))])
    seen = [mixture[i] for i in mixture.order_of_pass(0, 0, True)[np.arange(40)].tolist()]
    assert [each for each in seen if each < 50] != [each - 100 for each in seen if each > 50]


def test_mixture_of_mixtures_and_packed_sequences() -> None:
    packed = PackedTokens(documents(60), 8, shuffle_documents=True)
    mixture = Mixture([Mixture([packed, [{"input_ids": torch.zeros(8)}]]), SOURCES[0]], [1, 1], num_samples=50)
    for number in range(3):
        order = mixture.order_of_pass(0, number, True)
        found = [mixture[i] for i in order[np.arange(50)].tolist()]
        assert 24 <= sum(isinstance(each, int) for each in found) <= 26
        assert str([mixture[int(order[np.array([at])][0])] for at in (49, 3)]) == str([found[49], found[3]])


def test_mixture_as_any_dataset() -> None:
    """Its own numbers are positions of an unshuffled pass."""
    mixture = Mixture(SOURCES, [1, 1, 1])
    order = mixture.order_of_pass(0, 0, False)[np.arange(58)].tolist()
    assert [mixture[position] for position in range(58)] == [mixture[index] for index in order]
    assert pickle.loads(pickle.dumps(mixture))[5] == mixture[5]


@pytest.mark.parametrize("around", [lambda inner: RepeatDataset(inner, 2), lambda inner: ConcatDataset([inner]),
                                    lambda inner: PackedTokens(inner, 4)])  # fmt: skip
@pytest.mark.parametrize("given", [dict(weights=[1, 1]), dict(num_samples=5)])
def test_a_mixture_that_goes_on_is_no_part_of_datasets_with_one_pass(around: Any, given: dict[str, Any]) -> None:
    """Of the larger source they would never have what comes in later passes."""
    sources = [[[1, 2]] * 3, [[3, 4]] * 9]
    with pytest.raises(ConfigError, match=r"a Mixture with weights or num_samples goes on .* samples would never come"):
        around(Mixture([Mixture(sources, **given), sources[0]]))
    assert len(around(Mixture(sources)))


# Packing


@pytest.mark.parametrize("length", [1, 3, 8, 64])
def test_packed_in_stored_order(length: int) -> None:
    docs = documents(50)
    flat = list(chain(*docs))
    packed = PackedTokens(docs, length)
    assert len(packed) == len(flat) // length
    assert tokens_of(packed, range(len(packed))) == flat[: len(packed) * length]
    assert packed[0]["input_ids"].dtype is torch.int64
    assert packed[0]["labels"].tolist() == packed[0]["input_ids"].tolist()
    with pytest.raises(IndexError):
        packed[len(packed)]


@pytest.mark.parametrize("flat", [True, False])
def test_packed_token_files(tmp_path: Path, flat: bool) -> None:
    """With and without an index of the documents, over borders of files."""
    everything = [number % 7 for number in range(1000)]
    for number, (start, stop) in enumerate([(0, 10), (10, 10), (10, 700), (700, 1000)]):
        np.array(everything[start:stop], np.uint16).tofile(tmp_path / f"{number}.bin")
    packed = PackedTokens(TokenFiles(tmp_path, end_token=0), 33, segment_ids=not flat, labels="next")
    assert (packed._index is None) == flat
    assert len(packed) == 999 // 33
    for index in range(len(packed)):
        start = 33 * index
        assert packed[index]["input_ids"].tolist() == everything[start : start + 33]
        assert packed[index]["labels"].tolist() == everything[start + 1 : start + 34]


def test_boundaries_of_documents() -> None:
    packed = PackedTokens([[1, 2, 3], [], [4], [5, 6, 7, 8]], 5, end_token=0, position_ids=True, segment_ids=True)
    assert [packed[index]["input_ids"].tolist() for index in range(2)] == [[1, 2, 3, 0, 0], [4, 0, 5, 6, 7]]
    assert packed[0]["position_ids"].tolist() == [0, 1, 2, 3, 0]
    assert packed[0]["segment_ids"].tolist() == [0, 0, 0, 0, 1]
    assert packed[1]["position_ids"].tolist() == [0, 1, 0, 1, 2]
    assert packed[1]["segment_ids"].tolist() == [0, 0, 1, 1, 1]


def test_padding() -> None:
    packed = PackedTokens(
        [[1, 2, 3, 4, 5, 6, 7]], 5, last="pad", pad_token=9, labels="next", position_ids=True, segment_ids=True
    )
    assert len(packed) == 2
    last = {name: value.tolist() for name, value in packed[1].items()}
    assert last == {
        "input_ids": [6, 7, 9, 9, 9],
        "labels": [7, -100, -100, -100, -100],
        "position_ids": [0, 1, 0, 0, 0],
        "segment_ids": [0, 0, -1, -1, -1],
    }
    assert len(PackedTokens([[1, 2]], 100, last="pad", pad_token=0)) == 1
    # Exactly whole sequences have nothing to pad; a last token without a label begins no sequence.
    assert len(PackedTokens([[1, 2, 3, 4, 5, 6]], 5, last="pad", pad_token=0, labels="next")) == 1


def test_shuffled_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document stays whole and in its group; every pass has another order, and all tokens once."""
    monkeypatch.setattr(document_index, "GROUP", 16)
    docs = documents(100)
    packed = PackedTokens(docs, 7, shuffle_documents=True)
    count, usable = len(packed), len(packed) * 7
    passes = [tokens_of(packed, range(n * count, (n + 1) * count)) for n in range(3)]
    owner = {token: number for number, each in enumerate(docs) for token in each}
    for tokens in passes:
        assert len(set(tokens)) == usable
        turns = list(dict.fromkeys(owner[token] for token in tokens))
        assert [token for number in turns for token in docs[number]][:usable] == tokens
        assert [number // 16 for number in turns] == sorted(number // 16 for number in turns)
        assert turns != sorted(turns)
    assert passes[0] != passes[1] != passes[2]
    order = packed.order_of_pass(0, 2, True)[np.arange(count)].tolist()
    assert sorted(order) == list(range(2 * count, 3 * count))
    assert PackedTokens(docs, 7, shuffle_documents=True, seed=1)[0]["input_ids"].tolist() != passes[0][:7]


@pytest.mark.parametrize("labels", ["same", "next"])
@pytest.mark.parametrize("end_token", [None, 0])
def test_labels_are_written_to_alone(tmp_path: Path, labels: Any, end_token: int | None) -> None:
    """A transform may mask labels in place."""
    np.arange(1, 41, dtype=np.uint16).tofile(tmp_path / "0.bin")
    sample = PackedTokens(TokenFiles(tmp_path), 8, labels=labels, end_token=end_token)[1]
    sample["labels"][:4] = -100
    assert sample["input_ids"].tolist() == list(range(9, 17))


def test_samples_share_no_memory() -> None:
    """Labels may be masked in place, and what is kept of a document stays as it is."""
    packed = PackedTokens([list(range(1, 21))], 5)
    for _ in range(2):
        sample = packed[1]
        assert sample["input_ids"].tolist() == sample["labels"].tolist() == [6, 7, 8, 9, 10]
        sample["labels"][:] = -100
        assert sample["input_ids"].tolist() == [6, 7, 8, 9, 10]
        sample["input_ids"][:] = 0


class Counting:
    """A source of documents that counts how often one is read."""

    def __init__(self, docs: Documents) -> None:
        self.docs, self.reads = docs, 0
        self.fingerprint = "documents of the test"

    def __len__(self) -> int:
        return len(self.docs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"input_ids": torch.tensor(self.docs[index], dtype=torch.int32)}


def test_lengths_are_counted_once(tmp_path: Path) -> None:
    docs = documents(30)
    source = Counting(docs)
    first = PackedTokens(source, 4, index_dir=tmp_path)
    assert source.reads == 30 + 3  # three for the fingerprint
    again = Counting(docs)
    packed = PackedTokens(again, 4, index_dir=tmp_path)
    assert again.reads == 3
    assert (
        tokens_of(packed, range(len(packed)))
        == tokens_of(first, range(len(first)))
        == list(chain(*docs))[: len(packed) * 4]
    )
    changed = Counting([each[:-1] or each for each in docs])
    with pytest.raises(DataError, match=r"document \d+ of Counting has \d tokens, it had \d when they were counted"):
        tokens_of(PackedTokens(changed, 4, index_dir=tmp_path), range(10))
    with_end = Counting(docs)
    assert PackedTokens(with_end, 4, index_dir=tmp_path, end_token=0).num_tokens == packed.num_tokens + 30


def with_ends(folder: Path, ends: list[int]) -> PackedTokens:
    np.arange(1, 101, dtype=np.uint16).tofile(folder / "a.bin")
    np.save(folder / "a.bin.ends.npy", np.array(ends))
    return PackedTokens(TokenFiles(folder / "a.bin", ends=".ends.npy"), 10, shuffle_documents=True)


def test_ends_of_documents_that_were_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many documents: what was kept of their lengths is of others now."""
    monkeypatch.setattr(document_index, "_SMALL", 2)
    monkeypatch.setattr(document_index, "GROUP", 4)
    prints = set()
    for ends in ([*range(10, 101, 10)], [*range(9, 91, 10), 100]):
        packed = with_ends(tmp_path, ends)
        assert sorted(tokens_of(packed, range(len(packed)))) == [*range(1, 101)]
        prints.add(packed.fingerprint)
    assert len(prints) == 2


def test_lengths_that_are_not_those_that_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_index, "GROUP", 2)
    index = DocumentIndex(np.array([3, 4, 5, 6]), ends_of_groups([4, 4, 5, 6]))
    with pytest.raises(DataError, match=r"documents from number 0 on have 7 tokens, they had 8 when they were counted"):
        list(index.documents(0, 3, 0))


def test_packed_lines(tmp_path: Path) -> None:
    """Tokens made of text by a transform; the lengths are kept beside the files."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (3, 0, 5)))
    source = dict(
        type="JsonlFiles", paths=str(tmp_path), transform=lambda line: {"ids": [ord(c) for c in line["text"]]}
    )
    packed = PackedTokens(source, 4, key="ids", end_token=0)
    assert tokens_of(packed, range(2)) == [120, 120, 120, 0, 0, 120, 120, 120]
    assert len(list(tmp_path.glob("lengths-*.ftindex"))) == 1


class Few:
    """Lengths of a number of documents that do not exist; counts which are asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, span: slice) -> Any:
        start, stop, _ = span.indices(self.count)
        self.asked += stop - start
        return np.arange(start, stop) % 97 + 200


class EndsOfGroups:
    """Where the groups of these documents end, computed where it is looked up; counts how often."""

    def __init__(self, lengths: Few) -> None:
        self.count, self.asked = lengths.count, 0
        self.sums = np.cumsum(np.arange(97) + 200)

    def __len__(self) -> int:
        return (self.count - 1) // GROUP + 1

    def __getitem__(self, group: int) -> int:
        self.asked += 1
        whole, rest = divmod(min((range(len(self))[group] + 1) * GROUP, self.count), 97)
        return int(whole * self.sums[-1] + (self.sums[rest - 1] if rest else 0))


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_billion_documents(shuffled: bool) -> None:
    """Any sequence is found with the lengths of two groups, and their ends by bisection."""
    lengths = Few(10**9)
    ends = EndsOfGroups(lengths)
    assert [ends[group] for group in range(4)] == ends_of_groups(Few(5000))[:4].tolist()
    index = DocumentIndex(lengths, ends, seed=0 if shuffled else None)  # type: ignore[arg-type]
    for start in (0, 10**6, 123_456_789_012, index.num_tokens - 2048):
        lengths.asked = ends.asked = 0
        found = list(index.documents(start, start + 2048, number=5))
        assert sum(last - first for _, first, last in found) == 2048
        assert lengths.asked <= 2 * GROUP
        assert ends.asked <= 25


def test_what_decides_on_the_sequences_is_in_the_fingerprint() -> None:
    docs = documents(40)
    given: dict[str, list[Any]] = dict(
        length=[4, 5], labels=["same", "next"], end_token=[None, 3], shuffle_documents=[False, True]
    )
    prints = [
        PackedTokens(docs, **dict(zip(given, values, strict=True))).fingerprint for values in product(*given.values())
    ]
    assert len(set(prints)) == len(prints) == 16
    mixtures = [Mixture([docs, docs[:30]], weights).fingerprint for weights in (None, [1, 1], [1, 2])]
    assert len(set(mixtures)) == 3
    assert Mixture([docs, docs[:30]], [1, 2]).fingerprint == mixtures[2]


def test_a_transform_that_makes_other_tokens_changes_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('"abcdef"\n"ghi"\n' * 5)

    def packed(table: dict[str, int]) -> PackedTokens:
        lines = JsonlFiles(tmp_path / "texts.jsonl", transform=lambda text: [table[letter] for letter in text])
        return PackedTokens(lines, 4, index_dir=tmp_path / f"index{table['a']}")

    letters = {letter: number for number, letter in enumerate("abcdefghi")}
    turned = {letter: 8 - number for letter, number in letters.items()}
    assert packed(letters).fingerprint == packed(letters).fingerprint
    assert len(packed(letters)) == len(packed(turned))
    assert packed(letters).fingerprint != packed(turned).fingerprint


@pytest.mark.parametrize(
    "docs, message",
    [
        (
            [{"ids": [1]}],
            r'document 0 of list has no "input_ids", it has ids; give the source a transform that tokenizes, or say key=',
        ),
        (["text"], r"document 0 of list is no list of token numbers but str; give the source a transform"),
        ([[1.5, 2.0]], r"is no list of token numbers but float64 of shape \(2,\)"),
        ([[[1], [2]]], r"is no list of token numbers but int64 of shape \(2, 1\)"),
        ([[1, [2]]], r"document 0 of list is no list of token numbers, "),
        ([[1, 2], [3, 50_000]], r"document 1 of list has token 50000, it must be from 0 to 49999"),
        ([[1, -2]], r"document 0 of list has token -2, it must be from 0 to 49999"),
    ],
)
def test_documents_that_are_none(docs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        PackedTokens(docs, 1, vocab_size=50_000)
    assert "\n" not in str(error.value)


def test_longer_than_everything() -> None:
    with pytest.raises(
        ConfigError, match=r'PackedTokens.length: 100 is more than the 3 tokens .* give less, or last="pad"'
    ):
        PackedTokens([[1, 2, 3]], 100)
    with pytest.raises(ConfigError, match=r"of which the last has no label"):
        PackedTokens([[1, 2, 3]], 3, labels="next")
