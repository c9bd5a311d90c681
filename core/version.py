"""The version of flextrain."""

__version__ = "1.0.0"
