"""The trials of `bench layouts` as an Optuna study: in one SQLite file, or on a PostgreSQL server that machines share.

Layouts are added as waiting trials and claimed one by one. A claimed trial has an owner and a heartbeat; when its owner is
gone, the next process that looks marks it as failed. Connections are closed after each use, since trials are forked.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from ultrascale.cost.columns import CHOICES
from ultrascale.launch.exit_reason import state
from ultrascale.measure import bench_layouts
from ultrascale.measure.bench_layouts import LayoutCandidate, TrialRecord
from ultrascale.measure.bench_trial import TrialFailure, TrialResult, TrialStep, tensors_gib
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.folders import locked
from ultrascale.specs.layout import Layout
from ultrascale.specs.validate import shown
from ultrascale.train.request import Request

EXAMPLES = "sqlite:///study.db or postgresql://user@host/database"
FILE, SERVERS = "sqlite:///", ("postgresql://", "postgres://")
LOCK_WAIT_S = 30.0
BEAT_S, SILENT_S = 5, 60  # between heartbeats; a machine without one for so long is gone
ADVISORY_LOCK = 0x756C7472  # our key on the server
EARLY_STOP_FRACTION = 0.8  # of the best trial's tokens/s: a trial below that is stopped early
MIN_STEPS = 2  # before that is judged
OPTIONAL = tuple(name for name, field in Layout.model_fields.items() if field.default is None)
_STATES: dict[TrialState, bench_layouts.TrialState] = {
    TrialState.FAIL: "failed",
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.PRUNED: "stopped early",
    TrialState.COMPLETE: "measured",
}
"""of two trials of one layout, the one that stands later here is shown"""


class Study:
    """The trials of one job on one kind of machine."""

    beat_s = BEAT_S

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name, self.shown = url, name, without_password(url)
        with database(self.shown, opening=True), self._one_machine():
            self.storage = _open(url)
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=name,
                direction="maximize",
                load_if_exists=True,
                sampler=optuna.samplers.RandomSampler(),
            )
            self._id = self.storage.get_study_id_from_name(name)

    def offer(self, candidates: Iterable[LayoutCandidate], pruned_is_done: bool) -> None:
        """Add a waiting trial for every layout without a result. `pruned_is_done`: do not repeat one that was stopped early."""
        self.fail_orphans()
        with database(self.shown), self._one_machine():
            records = self.records()
            for one in candidates:
                record = records.get(one.layout)
                early = record is not None and record.state == "stopped early" and not pruned_is_done
                if record is None or record.kind == "interrupted" or early:
                    self.study.add_trial(_waiting(one.layout))

    def fail_orphans(self) -> None:
        """Mark trials as failed whose process is gone."""
        with database(self.shown):
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if _is_orphan(trial):
                    self._fail(trial.number, TrialFailure("interrupted", "the process that ran it is gone"))
            with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
                optuna.storages.fail_stale_trials(self.study)

    def claim(self, layouts: Iterable[Layout]) -> tuple[Layout, int] | None:
        """The first of these that waits, with the number of its trial, which is ours from now on."""
        with database(self.shown):
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            numbers = {_layout(trial): trial.number for trial in reversed(waiting)}
            for layout in layouts:
                if layout in numbers and self._set_state(numbers[layout], TrialState.RUNNING):
                    self.beat(numbers[layout])
                    self._note(numbers[layout], owner={"host": _host(), "pid": os.getpid()})
                    return layout, numbers[layout]
        return None

    def beat(self, number: int) -> None:
        with database(self.shown):
            self.storage.record_heartbeat(self._trial_id(number))

    def report(self, number: int, steps: list[TrialStep]) -> bool:
        """Store the steps of a trial; whether it is clearly slower than the best one that was measured to its end."""
        if not steps:
            return False
        with database(self.shown), _unless_failed():
            for step in steps:
                self.storage.set_trial_intermediate_value(self._trial_id(number), step.number, step.tokens_per_s)
            rates = self.storage.get_trial(self._trial_id(number)).intermediate_values.values()
            measured = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            return clearly_slower(list(rates), max((one.value or 0.0 for one in measured), default=0.0))
        return False

    def finish(self, number: int, ended: TrialResult | TrialFailure, seconds: float, folder: Path) -> None:
        with database(self.shown), _unless_failed():
            self._note(number, seconds=seconds, folder=str(folder))
            if isinstance(ended, TrialResult):
                measured = ended.measured
                self._note(number, measured=measured.model_dump(mode="json"), tensors_gib=tensors_gib(measured))
                self.storage.set_trial_state_values(self._trial_id(number), TrialState.COMPLETE, [measured.tokens_per_s])
            elif ended.kind == "stopped":
                self._note(number, reason=ended.reason)
                self.storage.set_trial_state_values(self._trial_id(number), TrialState.PRUNED)
            else:
                self._fail(number, ended)

    def records(self) -> dict[Layout, TrialRecord]:
        """The most telling trial of each layout."""
        with database(self.shown):
            trials = self.study.get_trials(deepcopy=False)
        order = list(_STATES)
        found = {_layout(trial): trial for trial in sorted(trials, key=lambda trial: order.index(trial.state))}
        return {layout: _record(trial) for layout, trial in found.items()}

    def _set_state(self, number: int, new: TrialState) -> bool:
        """False where another process was first."""
        try:
            return self.storage.set_trial_state_values(self._trial_id(number), new)
        except UpdateFinishedTrialError:
            return False

    def _trial_id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def _note(self, number: int, **values: Any) -> None:
        for name, value in values.items():
            self.storage.set_trial_user_attr(self._trial_id(number), name, value)

    def _fail(self, number: int, failure: TrialFailure) -> None:
        with _unless_failed():
            self._note(number, kind=failure.kind, reason=failure.reason)
            self._set_state(number, TrialState.FAIL)

    @contextmanager
    def _one_machine(self) -> Iterator[None]:
        """A lock on the server, so that no two machines create tables or offer trials at once."""
        if self.url.startswith(FILE):
            yield
            return
        address, connect = _address(self.url)
        try:
            engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.pool.NullPool, connect_args=connect)
        except ImportError:
            raise SpecError(
                "--storage is on PostgreSQL, and psycopg is not installed: try pip install 'psycopg[binary]'"
            ) from None
        with engine.connect() as connection:  # the server frees the lock with the connection, however that ends
            connection.execute(sqlalchemy.text(f"select pg_advisory_lock({ADVISORY_LOCK})"))
            yield


def _unless_failed() -> suppress:
    """Another machine took this process for dead and marked the trial as failed: it will run again, so ours is dropped."""
    return suppress(UpdateFinishedTrialError)


def clearly_slower(rates: list[float], best: float) -> bool:
    """Of tokens/s by step, against the best trial's."""
    return len(rates) >= MIN_STEPS and statistics.median(rates) < EARLY_STOP_FRACTION * best


def study_name(base: Request, device: str) -> str:
    """The same for every call that measures the same job on the same kind of machine."""
    job, training = base.job, base.training
    words = f"{job.model.name}, {job.sequences} × {job.seq} tokens, {job.precision}, {base.layout.gpus} × {device}"
    fields = {"model": job.model.model_dump(mode="json"), "gradients": job.gradients, "optimizer": job.optimizer}
    code = hashlib.sha256(json.dumps([fields, training.model_dump(mode="json")], sort_keys=True).encode()).hexdigest()[:8]
    return f"{words}, {training.steps} steps ({code})"


def _waiting(layout: Layout) -> FrozenTrial:
    params = {name: 0 if value is None else value for name, value in layout.model_dump().items()}
    distributions = {name: _distribution(name) for name in params}
    return optuna.create_trial(state=TrialState.WAITING, params=params, distributions=distributions)


def _distribution(name: str) -> BaseDistribution:
    if name in CHOICES:
        return CategoricalDistribution(CHOICES[name])
    if Layout.model_fields[name].annotation is bool:
        return CategoricalDistribution((False, True))
    return IntDistribution(0, 2**30)  # 0 stands for None


def _layout(trial: FrozenTrial) -> Layout:
    # Older studies do not have every field.
    return Layout(**trial.params | {name: trial.params.get(name) or None for name in OPTIONAL})


def _record(trial: FrozenTrial) -> TrialRecord:
    noted = trial.user_attrs
    rates = list(trial.intermediate_values.values())
    silent = trial.state == TrialState.FAIL and "kind" not in noted
    return TrialRecord(
        trial.number,
        _STATES[trial.state],
        trial.value if trial.state == TrialState.COMPLETE else statistics.median(rates) if rates else None,
        noted.get("tensors_gib"),
        "interrupted" if silent else noted.get("kind", ""),
        "the machine that ran it fell silent" if silent else noted.get("reason", ""),
        noted.get("seconds"),
        noted.get("folder", ""),
    )


def _is_orphan(trial: FrozenTrial) -> bool:
    """Whether the process of this machine that ran a trial is gone; processes of others are known by their heartbeats."""
    owner = trial.user_attrs.get("owner")
    if owner is None:  # it died between claiming the trial and writing its name
        return trial.datetime_start is None or datetime.now() - trial.datetime_start > timedelta(seconds=SILENT_S)
    return owner["host"] == _host() and not _lives(owner["pid"])


def _host() -> str:
    """With the boot, since a rebooted machine has other processes, and a container's name may be used again."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return state(pid) != "Z"


@contextmanager
def lock_file(url: str) -> Iterator[None]:
    """One process at a time on a file: SQLite cannot keep two from claiming the same trial. A server can."""
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
    with locked(lock, f"{file} is in use by another bench: wait for it, or share a server, --storage {EXAMPLES.split()[-1]}"):
        yield


def _open(url: str) -> optuna.storages.RDBStorage:
    address, connect = _address(url)
    template = address.replace("{", "{{").replace("}", "}}")  # Optuna fills templates
    engine = {"poolclass": sqlalchemy.pool.NullPool, "connect_args": connect}
    try:
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            return optuna.storages.RDBStorage(template, engine, heartbeat_interval=BEAT_S, grace_period=SILENT_S)
    except RuntimeError as error:  # tables of another Optuna version
        raise SpecError(f"--storage is {without_password(url)}: {error}") from None


def _address(url: str) -> tuple[str, dict[str, Any]]:
    """As SQLAlchemy wants it, with the arguments of its driver."""
    if url.startswith(FILE):
        return url, {"timeout": LOCK_WAIT_S}
    if url.startswith(SERVERS):
        return f"postgresql+psycopg://{url.partition('://')[2]}", {"connect_timeout": 10}
    raise SpecError(f"--storage is {shown(without_password(url))} but must be a database's address, such as {EXAMPLES}")


def without_password(url: str) -> str:
    try:
        return sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url


@contextmanager
def database(where: str, opening: bool = False) -> Iterator[None]:
    """Turn errors of the database into errors for the user."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        text = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        again = "What is finished is kept: the same command goes on from there"
        if "locked" in text:
            raise RunError(
                f"{where} is locked by another process for more than {LOCK_WAIT_S:g} s: end that. {again}"
            ) from error
        if "full" in text or "No space" in text:
            raise RunError(f"the disk of {where} is full: make room. {again}") from error
        if opening:
            raise SpecError(f"--storage is {where} but it cannot be opened ({text}): try {EXAMPLES}") from error
        raise RunError(f"{where} does not answer any more ({text}). {again}") from error
