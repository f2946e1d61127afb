"""What DBOS has no place for, in two tables beside its own: each job's creation, its progress, and who ends it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from bitmill_quantizer.jobs.database import connect
from bitmill_quantizer.jobs.job import JobPhase, Progress

_tables = sa.MetaData()
_entries = sa.Table(
    "bitmill_job_entry",
    _tables,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("sequence", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("time_ms", sa.BigInteger, nullable=False),
    sa.Column("phase", sa.String(16), nullable=False),
    sa.Column("completed", sa.BigInteger, nullable=False),
    sa.Column("total", sa.BigInteger, nullable=False),
    sa.Column("unit", sa.String(16), nullable=False),
    sa.Column("loss", sa.Float, nullable=True),
)
_jobs = sa.Table(
    "bitmill_job",
    _tables,
    sa.Column("job_id", sa.String(64), primary_key=True),
    # DBOS on SQLite keeps whole seconds, which is too little to sort by.
    sa.Column("create_time_ms", sa.BigInteger, nullable=False),
    sa.Column("claim", sa.String(16), nullable=True),
)


class Claim(enum.Enum):
    """How a job's end was decided, once and for all."""

    PUBLISH = "PUBLISH"
    CANCEL = "CANCEL"


@dataclass(frozen=True)
class Entry:
    """One report of a running job. `sequence` counts from 1."""

    sequence: int
    time: datetime
    phase: JobPhase
    progress: Progress


@dataclass(frozen=True)
class Summary:
    """When a job was created, when its first entry was made, and its last entry; None without entries."""

    create_time: datetime
    start_time: datetime | None = None
    last: Entry | None = None


class Journal:
    """The two tables in the database that DBOS uses too. Calls block; any thread may make them."""

    def __init__(self, database_url: str) -> None:
        self._engine = connect(database_url)
        _tables.create_all(self._engine)

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()

    def add(self, job_id: str) -> None:
        """Takes a job in before it is queued; one that is here already keeps its creation time."""
        now = sa.literal(_to_ms(datetime.now(UTC)), sa.BigInteger)
        known = sa.exists().where(_jobs.c.job_id == job_id)
        insert = sa.insert(_jobs).from_select(
            ["job_id", "create_time_ms"], sa.select(sa.literal(job_id), now).where(~known)
        )
        # Another may take it in between the look and the insert: PostgreSQL lets both look at once.
        with contextlib.suppress(sa.exc.IntegrityError), self._engine.begin() as connection:
            connection.execute(insert)

    def claim(self, job_id: str, claim: Claim) -> bool:
        """Takes the one claim on a job's end where it is free, and returns whether it is this one now."""
        free = sa.update(_jobs).where(_jobs.c.job_id == job_id, _jobs.c.claim.is_(None))
        with self._engine.begin() as connection:
            connection.execute(free.values(claim=claim.value))
        return self.held_claim(job_id) is claim

    def held_claim(self, job_id: str) -> Claim | None:
        """Returns the claim on a job's end, or None while it is free."""
        with self._engine.connect() as connection:
            value = connection.scalar(sa.select(_jobs.c.claim).where(_jobs.c.job_id == job_id))
        return None if value is None else Claim(value)

    def append(self, job_id: str, phase: JobPhase, progress: Progress) -> None:
        """Adds an entry, unless the job is cancelled: nothing follows the end of a history."""
        last = sa.select(sa.func.coalesce(sa.func.max(_entries.c.sequence), 0)).where(_entries.c.job_id == job_id)
        row: dict[str, Any] = {
            "time_ms": _to_ms(datetime.now(UTC)),
            "phase": phase.value,
            "completed": progress.completed,
            "total": progress.total,
            "unit": progress.unit,
            "loss": progress.loss,
        }
        cancelled = sa.exists().where(_jobs.c.job_id == job_id, _jobs.c.claim == Claim.CANCEL.value)
        values = [sa.literal(value, _entries.c[name].type) for name, value in row.items()]
        insert = sa.insert(_entries).from_select(
            ["job_id", "sequence", *row],
            sa.select(sa.literal(job_id), last.scalar_subquery() + 1, *values).where(~cancelled),
        )
        with self._engine.begin() as connection:
            connection.execute(insert)

    def entries(self, job_id: str, after_sequence: int = 0) -> list[Entry]:
        """Returns the entries after a position, in order."""
        query = (
            sa.select(_entries)
            .where(_entries.c.job_id == job_id, _entries.c.sequence > after_sequence)
            .order_by(_entries.c.sequence)
        )
        with self._engine.connect() as connection:
            return [_to_entry(row) for row in connection.execute(query).mappings()]

    def summaries(self, job_ids: Sequence[str]) -> dict[str, Summary]:
        """Returns the summary of each job that was taken in."""
        bounds = (
            sa.select(
                _entries.c.job_id,
                sa.func.min(_entries.c.time_ms).label("start_ms"),
                sa.func.max(_entries.c.sequence).label("last_sequence"),
            )
            .where(_entries.c.job_id.in_(job_ids))
            .group_by(_entries.c.job_id)
            .subquery()
        )
        of_job = bounds.c.job_id == _jobs.c.job_id
        last = sa.and_(_entries.c.job_id == bounds.c.job_id, _entries.c.sequence == bounds.c.last_sequence)
        query = (
            sa.select(_jobs.c.job_id.label("of"), _jobs.c.create_time_ms, bounds.c.start_ms, *_entries.c)
            .select_from(_jobs.outerjoin(bounds, of_job).outerjoin(_entries, last))
            .where(_jobs.c.job_id.in_(job_ids))
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        return {row["of"]: _to_summary(row) for row in rows}


def _to_summary(row: Any) -> Summary:
    create_time = _from_ms(row["create_time_ms"])
    if row["start_ms"] is None:
        return Summary(create_time)
    return Summary(create_time, _from_ms(row["start_ms"]), _to_entry(row))


def _to_entry(row: Any) -> Entry:
    progress = Progress(row["completed"], row["total"], row["unit"], row["loss"])
    return Entry(row["sequence"], _from_ms(row["time_ms"]), JobPhase(row["phase"]), progress)


def _to_ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _from_ms(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)
