"""What the phases of finished jobs took on this server: one table beside the journal's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

import sqlalchemy as sa

from bitmill_quantizer.jobs.database import connect
from bitmill_quantizer.jobs.job import JobPhase
from bitmill_quantizer.plans.durations import FinishedWork, PhaseWork

_tables = sa.MetaData()
_costs = sa.Table(
    "bitmill_phase_cost",
    _tables,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("phase", sa.String(16), primary_key=True),
    # Times depend on the machine, of which several may share a database.
    sa.Column("worker_id", sa.String(64), nullable=False),
    sa.Column("kind", sa.String(128), nullable=False),
    sa.Column("time_ms", sa.BigInteger, nullable=False),
    sa.Column("parameters", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("duration_s", sa.Float, nullable=False),
    sa.Index("bitmill_phase_cost_recent", "worker_id", "phase", "kind", "time_ms"),
)


class CostLedger:
    """The table of one worker's costs. Calls block; any thread may make them."""

    def __init__(self, database_url: str, worker_id: str) -> None:
        self._engine = connect(database_url)
        self._worker_id = worker_id
        self._is_ready = False

    def record(self, finished: Sequence[FinishedWork]) -> None:
        """Keeps what phases took. A phase of a job that is here already stays as it was."""
        now = int(datetime.now(UTC).timestamp() * 1000)
        for each in finished:
            row = {
                "job_id": each.job_id,
                "phase": each.work.phase.value,
                "worker_id": self._worker_id,
                "kind": each.work.kind,
                "time_ms": now,
                "parameters": each.work.parameters,
                "tokens": each.work.tokens,
                "num_bytes": each.work.num_bytes,
                "duration_s": each.duration_s,
            }
            with contextlib.suppress(sa.exc.IntegrityError), self._ready().begin() as connection:
                connection.execute(sa.insert(_costs).values(row))

    def recent(self, phase: JobPhase, kind: str, limit: int) -> list[FinishedWork]:
        """Returns the last finished work of a phase and a kind, the newest first: at most `limit`."""
        query = (
            sa.select(_costs)
            .where(_costs.c.worker_id == self._worker_id, _costs.c.phase == phase.value, _costs.c.kind == kind)
            .order_by(_costs.c.time_ms.desc(), _costs.c.job_id)
            .limit(limit)
        )
        with self._ready().connect() as connection:
            rows = connection.execute(query).mappings().all()
        return [
            FinishedWork(
                row["job_id"],
                PhaseWork(phase, kind, row["parameters"], row["tokens"], row["num_bytes"]),
                row["duration_s"],
            )
            for row in rows
        ]

    def close(self) -> None:
        """Closes its connections."""
        self._engine.dispose()

    def _ready(self) -> sa.Engine:
        # The directory of an SQLite database is made by the server's start, after this.
        if not self._is_ready:
            _tables.create_all(self._engine)
            self._is_ready = True
        return self._engine
