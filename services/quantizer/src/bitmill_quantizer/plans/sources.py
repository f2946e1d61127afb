"""What a job is made from: a checkpoint directory, or one GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

from bitmill_common.checkpoint import GGUF_SUFFIX, Checkpoint, inspect_source
from bitmill_common.object_store import ObjectStore
from bitmill_common.stores import Stores


@dataclass(frozen=True)
class Source:
    """The directory in a store, and the name of the GGUF file in it; empty for the directory as a whole."""

    store: ObjectStore
    file: str = ""

    def inspect(self) -> Checkpoint:
        """Returns what it holds; errors as of `inspect_source`."""
        return inspect_source(self.store, self.file)


def open_source(stores: Stores, uri: str, field: str) -> Source:
    """Opens a source by its URI, which names a GGUF file where it ends so. Errors as of `Stores.open`."""
    if uri.endswith(GGUF_SUFFIX):
        return Source(*stores.open_file(uri, field))
    return Source(stores.open(uri, field))
