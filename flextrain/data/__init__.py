"""Data sets in files of any size, mixtures of them, and packed sequences, which resume at any position at once."""

from __future__ import annotations

from ..core.base.errors import DataError
from ..core.comm.topology import data_shard
from ..runner.data.sources.arrow_files import ArrowFiles, ParquetFiles
from ..runner.data.sources.file_source import DataSource, FileSource
from ..runner.data.sources.jsonl_files import JsonlFiles
from ..runner.data.sources.tar_files import TarFiles
from ..runner.data.sources.token_files import TokenFiles
from ..runner.data.stream_orders import Order
from ..runner.data.streams.mixture import Mixture
from ..runner.data.streams.packing import PackedTokens

__all__ = [
    "ArrowFiles",
    "DataError",
    "DataSource",
    "FileSource",
    "JsonlFiles",
    "Mixture",
    "Order",
    "PackedTokens",
    "ParquetFiles",
    "TarFiles",
    "TokenFiles",
    "data_shard",
]
