"""Everything that a user can name, with its arguments: what `flextrain show` prints and the reference pages are made of."""

from .catalogue import catalogue, find, groups, near
from .entry import Argument, Entry, Method, Raised

__all__ = ["Argument", "Entry", "Method", "Raised", "catalogue", "find", "groups", "near"]
