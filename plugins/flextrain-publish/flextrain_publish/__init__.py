"""The weights of a training run for inference engines: whole, versioned, with a checksum of each tensor."""

from .engines import SGLangTarget, VLLMTarget
from .folder import FolderTarget, Published, published
from .hook import PublishHook
from .manifest import Entry, PublishError, digest
from .receiver import Receiver
from .transfer import HTTPTarget, TransferTarget

__all__ = [
    "Entry",
    "FolderTarget",
    "HTTPTarget",
    "PublishError",
    "PublishHook",
    "Published",
    "Receiver",
    "SGLangTarget",
    "TransferTarget",
    "VLLMTarget",
    "digest",
    "published",
]
