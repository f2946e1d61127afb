"""Whether a download fits the cache and its disk, and what has to make room for it."""

from __future__ import annotations

from dataclasses import dataclass

from bitmill_common.errors import ResourceExhaustedError

# What the cache may take when no bound is set: of what it holds and what its disk has free.
DEFAULT_DISK_FRACTION = 0.9


@dataclass(frozen=True)
class CacheRoom:
    """What a download needs and what there is, in bytes.

    `held` by whole entries, `pending` by downloads of others in all, of which `staged` are on the disk already.
    """

    size: int
    max_bytes: int | None
    held: int
    pending: int
    staged: int
    free: int

    @property
    def bound(self) -> int:
        """Most bytes that the cache may have."""
        if self.max_bytes is not None:
            return self.max_bytes
        return int(DEFAULT_DISK_FRACTION * (self.held + self.staged + self.free))

    @property
    def excess(self) -> int:
        """Bytes to remove before the download."""
        coming = self.size + self.pending
        return max(self.held + coming - self.bound, coming - self.staged - self.free)

    def check_possible(self) -> None:
        """Raises when there would be no room in an empty cache either."""
        if self.size <= self.bound:
            return
        if self.max_bytes is None:
            raise self._disk_full(self.held + self.free)
        raise ResourceExhaustedError(
            "CACHE_TOO_SMALL",
            f"{self.size} bytes are more than this server keeps on its disk: cache_max_bytes is {self.max_bytes}",
            self._numbers,
        )

    def check_enough(self, removable: int) -> None:
        """Raises when `removable` bytes, all that nobody uses, are not enough."""
        if removable >= self.excess:
            return
        free = self.free + removable
        if self.max_bytes is None or self.size + self.pending - self.staged > free:
            raise self._disk_full(free)
        in_use = self.held + self.pending - removable
        raise ResourceExhaustedError(
            "CACHE_FULL",
            f"{self.size} bytes do not fit beside the {in_use} that loaded models use: cache_max_bytes is "
            f"{self.max_bytes}; unload a model",
            self._numbers | {"in_use_bytes": str(in_use)},
        )

    def _disk_full(self, available: int) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            "DISK_FULL",
            f"{self.size} bytes do not fit on this server's disk: {available} are free or can be made free, and other "
            f"downloads take {self.pending - self.staged}"
            + ("" if self.max_bytes else "; without cache_max_bytes the cache leaves a tenth of the disk's room free"),
            self._numbers | {"available_bytes": str(available)},
        )

    @property
    def _numbers(self) -> dict[str, str]:
        return {"size_bytes": str(self.size), "cache_max_bytes": str(self.bound), "free_bytes": str(self.free)}
