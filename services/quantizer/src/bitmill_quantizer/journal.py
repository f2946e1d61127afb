"""What DBOS has no place for, in two tables beside its own: each job's progress, and who may still decide its end."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from bitmill_quantizer.jobs import JobPhase, Progress

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
_claims = sa.Table(
    "bitmill_job_claim",
    _tables,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("claim", sa.String(16), nullable=False),
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
    """A job's last entry, and the time of its first."""

    start_time: datetime
    last: Entry


class Journal:
    """The two tables in the database that DBOS uses too. Calls block; any thread may make them."""

    def __init__(self, database_url: str) -> None:
        self._engine = _connect(database_url)
        _tables.create_all(self._engine)

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()

    def claim(self, job_id: str, claim: Claim) -> Claim:
        """Takes the one claim on a job's end where it is free, and returns whose it is."""
        insert = sa.insert(_claims).from_select(
            ["job_id", "claim"],
            sa.select(sa.literal(job_id), sa.literal(claim.value)).where(
                ~sa.exists().where(_claims.c.job_id == job_id)
            ),
        )
        try:
            with self._engine.begin() as connection:
                connection.execute(insert)
        except sa.exc.IntegrityError:
            # Another took it between the look and the insert; PostgreSQL lets both look at once.
            pass
        held = self.held_claim(job_id)
        if held is None:
            raise AssertionError(f"no claim on {job_id} after an insert")
        return held

    def held_claim(self, job_id: str) -> Claim | None:
        """Returns the claim on a job's end, or None while it is free."""
        with self._engine.connect() as connection:
            value = connection.scalar(sa.select(_claims.c.claim).where(_claims.c.job_id == job_id))
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
        cancelled = sa.exists().where(_claims.c.job_id == job_id, _claims.c.claim == Claim.CANCEL.value)
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
        """Returns the summary of each job that has entries."""
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
        query = sa.select(_entries, bounds.c.start_ms).join(
            bounds, sa.and_(_entries.c.job_id == bounds.c.job_id, _entries.c.sequence == bounds.c.last_sequence)
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        return {row["job_id"]: Summary(_from_ms(row["start_ms"]), _to_entry(row)) for row in rows}


def _connect(database_url: str) -> sa.Engine:
    url = sa.make_url(database_url)
    if url.get_backend_name() != "sqlite":
        return sa.create_engine(url.set(drivername="postgresql+psycopg"), pool_size=5, pool_pre_ping=True)
    engine = sa.create_engine(url)

    # As DBOS sets its own connections up. With the write-ahead log watchers never wait for a writer, nor it for them.
    @sa.event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        connection.isolation_level = "IMMEDIATE"
        connection.execute("PRAGMA busy_timeout=30000")
        connection.execute("PRAGMA journal_mode=WAL")

    return engine


def _to_entry(row: Any) -> Entry:
    progress = Progress(row["completed"], row["total"], row["unit"], row["loss"])
    return Entry(row["sequence"], _from_ms(row["time_ms"]), JobPhase(row["phase"]), progress)


def _to_ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _from_ms(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)
