"""Sources that stand around the user's are copied and pickled as themselves, also where the user's says how it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from flextrain.runner.data.checks import FirstSamples
from flextrain.runner.data.streams.divided_streams import DividedStream, KeptPasses


class Own:
    """A dataset that has a copy and a pickled state of its own, as those of Hugging Face have."""

    def __init__(self) -> None:
        self.numbers = [3, 4, 5]

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        return Own()

    def __iter__(self) -> Any:
        return iter(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.numbers[index] for index in indices]

    def __len__(self) -> int:
        return len(self.numbers)


@pytest.mark.parametrize(
    "source", [FirstSamples(Own(), 2), DividedStream(Own(), (1, 2), True), KeptPasses(Own())], ids=lambda it: type(it).__name__
)  # fmt: skip
def test_a_copy_is_of_the_same_class_and_gives_the_same(source: Any) -> None:
    expected = [source[index] for index in range(2)] if isinstance(source, FirstSamples) else [*source]
    for copied in (copy.copy(source), copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert type(copied) is type(source)
        assert type(copied.dataset) is Own
        assert ([copied[index] for index in range(2)] if isinstance(copied, FirstSamples) else [*copied]) == expected


def test_samples_of_several_indices_are_still_asked_for_at_once() -> None:
    assert FirstSamples(Own(), 2).__getitems__([1, 0]) == [4, 3]
