"""The version of flextrain."""

__version__ = "0.1.0"
