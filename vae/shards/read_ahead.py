"""Fetches shards before they are needed, and keeps them while they are, in threads of a training process."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from vae.images.formats import BadImageError
from vae.shards.shard_cache import Entry, ShardCache
from vae.system.errors import UserError

THREADS = 4  # one connection seldom has the bandwidth of a network


class ReadAhead:
    """The shards that this process has in use: pinned in a cache, downloaded if they are not there."""

    def __init__(self, cache: ShardCache, fetch: Callable[[Entry], object]) -> None:
        """`fetch` puts a shard into the cache, if there is room."""
        self._cache, self._fetch = cache, fetch
        self._guard = threading.Lock()
        self._wanted: set[Entry] = set()
        self._pinned: set[Entry] = set()
        self._todo: deque[Entry] = deque()
        self._threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return len(self._pinned)

    def want(self, shards: Sequence[Entry]) -> None:
        """Fetch and keep these shards, in this order, and no others."""
        with self._guard:
            self._wanted = set(shards)
            for gone in self._pinned - self._wanted:
                self._cache.unpin(gone)
            self._pinned &= self._wanted
            self._todo = deque(shard for shard in shards if shard not in self._pinned)
            self._cache.look_again()  # there may be room now
            self._start()

    def fetch(self, shard: Entry) -> None:
        """Fetch one more shard, without keeping it."""
        with self._guard:
            if shard not in self._todo:
                self._todo.append(shard)
                self._start()

    def _start(self) -> None:
        for _ in range(min(THREADS, len(self._todo)) - len(self._threads)):
            thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
            self._threads.add(thread)
            thread.start()

    def join(self) -> None:
        """Wait until nothing is left to fetch."""
        for thread in list(self._threads):
            thread.join()

    def _run(self) -> None:
        while True:
            with self._guard:
                if not self._todo:
                    self._threads.discard(threading.current_thread())
                    return
                shard = self._todo.popleft()
            try:
                self._keep(shard)
            except (BadImageError, UserError, OSError):
                continue  # the process that reads the shard reports it

    def _keep(self, shard: Entry) -> None:
        self._fetch(shard)
        with self._guard:
            if shard not in self._wanted or shard in self._pinned:
                return
            self._cache.pin(shard)
            if self._cache.find(shard):
                self._pinned.add(shard)
            else:  # no room, or another process has removed it just now
                self._cache.unpin(shard)
