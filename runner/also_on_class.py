"""AlsoOnClass: a method that can be called on the class, before there is an object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class AlsoOnClass:
    """Decorator of a method whose ``self`` is None when it is called on the class.

    MMEngine has some static methods that need no runner; here they know more when there is one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        return functools.update_wrapper(functools.partial(self._function, instance), self._function)
