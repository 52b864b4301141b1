"""Where `bench layouts` keeps its trials: opening Optuna's storage, and what to say when the database cannot."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy

from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.folders import alone
from ultrascale.specs.validate import shown

EXAMPLES = "sqlite:///study.db or postgresql://user@host/database"
LOCK_WAIT_S = 30.0
BEAT_S, SILENT_S = 5, 60  # a machine that has not beaten for so long is gone
TURN = 0x756C7472  # the key of our lock on a server: any number that is ours
FILE, SERVERS = "sqlite:///", ("postgresql://", "postgres://")


@contextmanager
def ours(url: str) -> Iterator[None]:
    """A file is for one process at a time: SQLite cannot keep two from claiming the same trial. A server can."""
    if not url.startswith(FILE):
        yield
        return
    file = Path(url.removeprefix(FILE))
    lock = file.with_name(f"{file.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise SpecError(f"--storage is {url} but cannot be written ({error.strerror}): try {EXAMPLES}") from None
    with alone(lock, f"{file} is in use by another bench: wait for it, or share a server, --storage {EXAMPLES.split()[-1]}"):
        yield


@contextmanager
def database(where: str, opening: bool = False) -> Iterator[None]:
    """What a database says when it cannot, as a sentence."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise _sentence(error, where, opening) from error


@contextmanager
def in_turn(url: str) -> Iterator[None]:
    """On a server, one machine at a time: two that make the tables, or offer the same trials, would do it twice."""
    if url.startswith(FILE):
        yield
        return
    address, connect = _address(url)
    try:
        engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.pool.NullPool, connect_args=connect)
    except ImportError:
        raise SpecError("--storage is on PostgreSQL, and psycopg is not installed: try pip install 'psycopg[binary]'") from None
    with engine.connect() as connection:  # the server gives the lock back with the connection, however that ends
        connection.execute(sqlalchemy.text(f"select pg_advisory_lock({TURN})"))
        yield


def opened(url: str) -> optuna.storages.RDBStorage:
    address, connect = _address(url)
    template = address.replace("{", "{{").replace("}", "}}")  # Optuna fills templates
    engine = {"poolclass": sqlalchemy.pool.NullPool, "connect_args": connect}
    try:
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            return optuna.storages.RDBStorage(template, engine, heartbeat_interval=BEAT_S, grace_period=SILENT_S)
    except RuntimeError as error:  # Optuna's tables are of another version
        raise SpecError(f"--storage is {without_password(url)}: {error}") from None


def _address(url: str) -> tuple[str, dict[str, Any]]:
    """As SQLAlchemy wants it, and what its driver is told."""
    if url.startswith(FILE):
        return url, {"timeout": LOCK_WAIT_S}
    if url.startswith(SERVERS):
        return f"postgresql+psycopg://{url.partition('://')[2]}", {"connect_timeout": 10}
    raise SpecError(f"--storage is {shown(without_password(url))} but must be a database's address, such as {EXAMPLES}")


def _sentence(error: Exception, where: str, opening: bool) -> Exception:
    cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
    text = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
    again = "What is finished is kept: the same command goes on from there"
    if "locked" in text:
        return RunError(f"{where} is locked by another process for more than {LOCK_WAIT_S:g} s: end that. {again}")
    if "full" in text or "No space" in text:
        return RunError(f"the disk of {where} is full: make room. {again}")
    if opening:
        return SpecError(f"--storage is {where} but it cannot be opened ({text}): try {EXAMPLES}")
    return RunError(f"{where} does not answer any more ({text}). {again}")


def without_password(url: str) -> str:
    try:
        return sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url
