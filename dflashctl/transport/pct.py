"""A container of a Proxmox host: every command goes through `pct exec` there, with no shell inside and no copy on the host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

from dflashctl.errors import NoProgram
from dflashctl.transport import explain
from dflashctl.transport.base import EXPLANATION_SECONDS, Channel, Finding, Silence, Transport
from dflashctl.transport.bounded import within
from dflashctl.transport.explain import Ask, Place, Reading
from remote.protocol.errors import DflashError, usage_error

# By its full path: the PATH of a command that ssh runs may lack /usr/sbin, and a sudoers rule names a path.
PCT = "/usr/sbin/pct"
_CT = re.compile(r"[1-9][0-9]{2,8}")
# More than any `pct config` prints, and little enough for a far end that never stops talking.
_MOST_BYTES = 1 << 16


def is_ct(text: str) -> bool:
    """Whether `text` is a container id, as Proxmox has them."""
    return _CT.fullmatch(text) is not None


class Host(Transport, Protocol):
    """A way to a machine that may have containers."""

    @property
    def user(self) -> str:
        """Who commands run as there; known without contact."""
        ...


class Pct:
    """Container `ct` of the Proxmox host that `hop` reaches. Raises a usage error for an id that is none."""

    def __init__(self, ct: int | str, hop: Host) -> None:
        if not is_ct(str(ct)):
            raise usage_error(
                f"{ct!r} is no container id", hint="it is a number of 100 or more, as `pct list` shows it"
            )
        self._ct = str(ct)
        self._hop = hop

    @property
    def name(self) -> str:
        return f"container {self._ct} on {self._hop.name}"

    @cached_property
    def _pct(self) -> tuple[str, ...]:
        # -n: sudo must fail, not wait for a password that nobody is there to type.
        return (PCT,) if self._hop.user == "root" else ("sudo", "-n", PCT)

    @property
    def _place(self) -> Place:
        host = "this machine" if self._hop.name == "local" else self._hop.name
        return Place(self._ct, host, " ".join(word for word in self._pct if word != "-n"), self._hop.user)

    def open(self, argv: Sequence[str]) -> Channel:
        # --: without it pct takes the options of `argv` for its own. Never --keep-env: it would swallow the next word.
        return self._open_on_host([*self._pct, "exec", self._ct, "--", *argv])

    def _open_on_host(self, argv: Sequence[str]) -> Channel:
        try:
            return self._hop.open(argv)
        except NoProgram as error:
            # The machine itself found no such file; told as a shell would, so that there is one sentence for it.
            said = f"{argv[0]}: {'command not found' if argv[0] == 'sudo' else 'No such file or directory'}"
            reading = explain.read(said, self._place)
            raise reading.error if reading else error from None

    def explain(self, said: str, *, silent: bool = False) -> DflashError | None:
        reading = explain.read(said, self._place, silent=silent)
        if reading is not None and reading.ask is Ask.NOTHING:
            return reading.error
        return within(
            EXPLANATION_SECONDS,
            # The container first: a login shell's noise has lines that mean something to the hop behind.
            lambda: self._look(reading, silent=silent) or self._hop.explain(said, silent=silent),
            lambda: reading.error if reading else explain.host_silent(self._place, EXPLANATION_SECONDS),
        )

    def _look(self, reading: Reading | None, *, silent: bool) -> DflashError | None:
        """Ask the host for what the words leave open."""
        try:
            if reading is None or reading.ask is Ask.STATUS:
                return self._look_at_status(reading, silent=silent)
            return self._completed(reading)
        except DflashError as error:
            # The host cannot be asked any more: that explains it as well, but for what is known better already.
            return reading.error if reading else error

    def _look_at_status(self, reading: Reading | None, *, silent: bool) -> DflashError | None:
        said = self._ask("status", self._ct)
        status = _value(said, "status")
        if status == "running":
            return explain.frozen(self._place, self._lock()) if silent else reading and reading.error
        if status == "stopped":
            return explain.stopped(self._place, self._lock(), "`pct status` says so")
        # No status, but words: of sudo, of the shell, or that there is no such container.
        answered = explain.read(said, self._place)
        return self._completed(answered) if answered else reading and reading.error

    def _completed(self, reading: Reading) -> DflashError:
        if reading.ask is Ask.LOCK:
            return explain.stopped(self._place, self._lock(), reading.error.cause)
        if reading.ask is Ask.NODE:
            return explain.elsewhere(self._place, self._configurations(), reading.error.cause) or reading.error
        return reading.error

    def _lock(self) -> str:
        return _value(self._ask("config", self._ct), "lock")

    def _configurations(self) -> str:
        """Return where in the cluster a guest of this id is configured; only root may look there."""
        if self._hop.user != "root":
            return ""
        return self._answer(["find", "/etc/pve/nodes", "-maxdepth", "3", "-name", f"{self._ct}.conf"])

    def _ask(self, *words: str) -> str:
        return self._answer([*self._pct, *words])

    def _answer(self, argv: Sequence[str]) -> str:
        """Run a short command on the host and return all it says."""
        channel = self._open_on_host(argv)
        try:
            channel.finish()
            said = bytearray()
            while len(said) < _MOST_BYTES and (piece := channel.receive(EXPLANATION_SECONDS)):
                said += piece
            return f"{said.decode('utf-8', errors='replace')}\n{channel.diagnostics()}"
        except Silence:
            raise explain.host_silent(self._place, EXPLANATION_SECONDS) from None
        finally:
            channel.close()

    def examine(self) -> Iterator[Finding]:
        for finding in self._hop.examine():
            yield finding
            if finding.state == "failed":
                return
        yield from self._examine_container()

    def _examine_container(self) -> Iterator[Finding]:
        try:
            said = self._ask("status", self._ct)
        except DflashError as error:
            yield _failed("pct", error)
            return
        reading, status = explain.read(said, self._place), _value(said, "status")
        if not status and (reading is None or reading.ask is Ask.NOTHING):
            unclear = f"`{self._place.pct} status {self._ct}` said {said.strip()[-200:] or 'nothing'}"
            yield _failed("pct", reading.error) if reading else Finding("pct", "failed", unclear)
            return
        yield Finding("pct", "ok", f"{self._place.pct} answers")
        yield self._container(status, reading)

    def _container(self, status: str, reading: Reading | None) -> Finding:
        try:
            lock = self._lock() if status else ""
            if status == "running":
                state = "warning" if lock else "ok"
                return Finding("container", state, f"{self._ct} is running" + (f", locked ({lock})" if lock else ""))
            if reading is not None:
                return _failed("container", self._completed(reading))
            return _failed("container", explain.stopped(self._place, lock, f"its status is {status}"))
        except DflashError as error:
            return _failed("container", error)

    def close(self) -> None:
        self._hop.close()


def _value(said: str, key: str) -> str:
    """Return the value of a line `key: value`, "" when there is none."""
    match = re.search(rf"^{key}: *(\S+)", said, re.MULTILINE)
    return match[1] if match else ""


def _failed(name: str, error: DflashError) -> Finding:
    return Finding(name, "failed", error.error, error.hint, error.code)
