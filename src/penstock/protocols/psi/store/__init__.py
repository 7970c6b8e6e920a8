"""Named sets of streams: our own over logs and rings, and psi's files.

`catalog` knows the streams of any store, `streams` is a store of ours, `psi_files` reads psi's
(`extents` is their layout), `lookup` finds and opens both, `export` writes them to other formats.
"""

from penstock.protocols.psi.store.catalog import Catalog, StreamInStore
from penstock.protocols.psi.store.lookup import find_store, list_places, open_store
from penstock.protocols.psi.store.psi_files import (
    PsiFiles,
    PsiStoreReader,
    StoredMessage,
    find_stores,
)
from penstock.protocols.psi.store.streams import Place, Store

__all__ = [
    "Catalog",
    "Place",
    "PsiFiles",
    "PsiStoreReader",
    "Store",
    "StoredMessage",
    "StreamInStore",
    "find_store",
    "find_stores",
    "list_places",
    "open_store",
]
