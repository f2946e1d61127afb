"""Connections to the job database, which DBOS uses too."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


def connect(database_url: str) -> sa.Engine:
    """Returns an engine for a sqlite:/// or postgresql:// URL. Nothing is opened before it is used."""
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
