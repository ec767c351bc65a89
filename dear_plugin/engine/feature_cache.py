"""What a frozen CLIP makes of an image, kept on disk between epochs, runs and processes (ours).

For images that are not augmented: tests of many seeds and checkpoints on one list, training with fixed crops. A hit
costs a read; the image is not decoded and the layers below the first trained one do not run. An entry belongs to the
bytes of the vision tower, the layer, the precision, the transform, and path, time and size of the image file: if any
of them changes, it is another entry. One SQLite file, so writes are atomic and processes may share it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FILE = "features.sqlite"
WAIT_S = 60.0  # for another process's write
_TOUCHED = 512  # entries whose use is noted at a time
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, dtype TEXT, shape TEXT, crc INTEGER, size INTEGER,
                                    used REAL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON entries (used);
CREATE TABLE IF NOT EXISTS contents (key BLOB PRIMARY KEY, data BLOB);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entries BEGIN UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS dropped AFTER DELETE ON entries BEGIN
    UPDATE total SET bytes = bytes - old.size; DELETE FROM contents WHERE key = old.key; END;
"""
_FIND = "SELECT dtype, shape, crc, data FROM entries JOIN contents USING (key) WHERE key = ?"


class FeatureCache:
    """Tensors by image. `made_by`: everything that the features depend on besides the image file and its transform."""

    def __init__(self, folder: str | Path, *, limit_gib: float, made_by: Sequence[Any]) -> None:
        if limit_gib <= 0:
            raise ValueError(f"DATALOADER.FEATURE_CACHE_GIB is {limit_gib:g}; wanted more than 0")
        self.path, self.limit = Path(folder).expanduser() / FILE, int(limit_gib * 2**30)
        self.made_by = repr(tuple(made_by))
        self.hits = self.misses = 0
        self._connections: dict[int, sqlite3.Connection] = {}
        self._touched: set[bytes] = set()
        self._full = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection().executescript(_SCHEMA)
        except (OSError, sqlite3.OperationalError) as error:
            raise ValueError(f"DATALOADER.FEATURE_CACHE: {self.path} cannot be written ({error}): give another folder, "
                             "or none") from error
        except sqlite3.DatabaseError as error:
            self._start_anew(error)

    # -- reading: in the worker processes of a loader -----------------------------------------------------------------

    def key(self, path: str, transform: str) -> bytes:
        """Which entry is that of an image as it lies on the disk now."""
        found = os.stat(path)
        facts = (self.made_by, transform, os.path.abspath(path), found.st_mtime_ns, found.st_size)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()

    def get(self, key: bytes) -> Tensor | None:
        """The tensor on the CPU; None if it is not there, or not whole."""
        try:
            row = self._connection().execute(_FIND, (key,)).fetchone()
        except sqlite3.Error:  # found out and repaired at the next write
            return None
        if row is None or zlib.crc32(row[3]) != row[2]:
            return None
        shape = [int(side) for side in row[1].split(",")]
        return torch.frombuffer(bytearray(row[3]), dtype=getattr(torch, row[0])).view(shape)

    # -- writing: in the main process ---------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], features: Tensor) -> None:
        """Keep features [N, ...]; what was not used for longest makes room. A disk without room is said once."""
        if self._full or not keys:
            return
        try:
            self._put(keys, features.detach().cpu().contiguous())
        except sqlite3.OperationalError as error:  # full, or held by another process for too long
            self._full = True
            print(f"Note: the feature cache takes no more entries: {error} ({self.path})")
        except sqlite3.DatabaseError as error:
            self._start_anew(error)

    def _put(self, keys: Sequence[bytes], features: Tensor) -> None:
        now, dtype = time.time(), str(features.dtype).removeprefix("torch.")
        shape = ",".join(map(str, features.shape[1:]))
        contents = [row.flatten().view(torch.uint8).numpy().tobytes() for row in features]
        size = len(contents[0])
        fits = min(len(contents), self.limit // size)
        with self._connection() as connection:  # one transaction
            connection.execute("BEGIN IMMEDIATE")
            self._note_use(connection, now)
            self._make_room(connection, fits * size)
            for key, data in list(zip(keys, contents, strict=True))[:fits]:
                connection.execute("DELETE FROM entries WHERE key = ?", (key,))
                connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)",
                                   (key, dtype, shape, zlib.crc32(data), size, now))
                connection.execute("INSERT OR REPLACE INTO contents VALUES (?, ?)", (key, data))

    def _make_room(self, connection: sqlite3.Connection, wanted: int) -> None:
        over = connection.execute("SELECT bytes FROM total").fetchone()[0] + wanted - self.limit
        if over <= 0:
            return
        leaving = []
        for key, size in connection.execute("SELECT key, size FROM entries ORDER BY used"):
            leaving.append((key,))
            over -= size
            if over <= 0:
                break
        connection.executemany("DELETE FROM entries WHERE key = ?", leaving)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that entries were used."""
        self._touched.update(keys)
        if len(self._touched) >= _TOUCHED:
            try:
                with self._connection() as connection:
                    self._note_use(connection, time.time())
            except sqlite3.Error:
                self._touched.clear()  # only the order of leaving suffers

    def _note_use(self, connection: sqlite3.Connection, now: float) -> None:
        connection.executemany("UPDATE entries SET used = ? WHERE key = ?", [(now, key) for key in self._touched])
        self._touched.clear()

    # -- the file -----------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Bytes of all tensors in it."""
        return self._connection().execute("SELECT bytes FROM total").fetchone()[0]

    def _connection(self) -> sqlite3.Connection:
        """One of this process: a connection must not cross a fork (nor be closed behind one: the old ones are kept)."""
        if os.getpid() not in self._connections:
            connection = sqlite3.connect(self.path, timeout=WAIT_S)
            connection.execute("PRAGMA journal_mode = WAL")  # readers do not wait for a writer
            connection.execute("PRAGMA synchronous = NORMAL")
            self._connections[os.getpid()] = connection
        return self._connections[os.getpid()]

    def _start_anew(self, error: Exception) -> None:
        """A damaged file holds nothing that cannot be computed again."""
        print(f"Note: the feature cache {self.path} is damaged ({error}): starting an empty one")
        connection = self._connections.pop(os.getpid(), None)
        if connection is not None:
            connection.close()
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(FILE + suffix).unlink(missing_ok=True)
        self._connection().executescript(_SCHEMA)

    def __getstate__(self) -> dict[str, Any]:  # for workers that are not forked
        return {**self.__dict__, "_connections": {}}

    def sentence(self) -> str:
        return (f"Feature cache: {self.hits:,} images from {self.path}, {self.misses:,} computed; it holds "
                f"{self.size() / 2**30:.2f} of {self.limit / 2**30:g} GiB")


class Lookup:
    """The cache under one transform: what a data set asks before it decodes."""

    def __init__(self, cache: FeatureCache, transform: Any) -> None:
        self.cache, self.transform = cache, re.sub(r" at 0x[0-9a-f]+", "", repr(transform))  # functions show addresses

    def find(self, path: str) -> tuple[bytes, Tensor | None]:
        key = self.cache.key(path, self.transform)
        return key, self.cache.get(key)


def tower_digest(tower: nn.Module) -> str:
    """Hex sha256 of a frozen tower: its modules as they print, their heads, and its tensors' names, dtypes, bytes."""
    heads = [getattr(module, "num_heads", None) for module in tower.modules()]
    digest = hashlib.sha256(f"{tower!r};{heads};".encode())  # weights alone do not tell the activation
    for name, value in sorted(tower.state_dict().items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
