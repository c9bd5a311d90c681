"""Configuration files: Python, YAML, JSON and TOML, with inheritance, references and options of the command line."""

from __future__ import annotations

from .cfg_options import DictAction, parse_option, parse_options
from .config_dict import ConfigDict
from .config_file import Config, read_base
from .located_errors import located
from .merging import path_text
from .origins import Origins, ValueOrigin
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
