"""Configuration files: Python, YAML, JSON and TOML, with inheritance, references and options of the command line."""

from __future__ import annotations

from .config_dict import ConfigDict, Origins, ValueOrigin, path_text
from .config_file import Config, DictAction, located, parse_option, parse_options, read_base
from .reading import SUFFIXES

__all__ = [
    "SUFFIXES",
    "Config",
    "ConfigDict",
    "DictAction",
    "ValueOrigin",
    "Origins",
    "located",
    "parse_option",
    "parse_options",
    "path_text",
    "read_base",
]
