"""What every verb begins with: settings, destination, source tree, and a client of the agent over there."""

from __future__ import annotations

import dataclasses
import getpass
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dflashctl.agent_client import AgentClient
from dflashctl.console import ERR, harmless
from dflashctl.destinations import Destination, DestinationStore
from dflashctl.home import state_directory, user_file
from dflashctl.settings import Settings, find_project_file, resolve, with_destination
from dflashctl.source import Source, find_source, is_source
from dflashctl.transport import Transport, make_transport
from remote.protocol.errors import DflashError

if TYPE_CHECKING:
    from remote.protocol.records import RunStatus

SYSTEM_PYTHON = "/usr/bin/python3"


def default_python(is_here: bool) -> str:
    """Return the interpreter to use where nobody named one: here the one that runs us, if it has what trains."""
    # find_spec looks without importing: torch itself would take seconds. A container has files of its own.
    if is_here and sys.executable and importlib.util.find_spec("torch") is not None:
        return sys.executable
    return SYSTEM_PYTHON


def operator() -> str:
    """Return who asks, for the registry over there."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A user id without an entry in passwd, as containers have them; which of the two depends on Python's version.
        user = "unknown"
    return f"{user}@{platform.node()}"


def _prepare_to_show() -> None:
    """Import what answers are read and shown with, in the time that the far end takes to answer: 30 ms."""
    importlib.import_module("dflashctl.results").parse  # noqa: B018  # a lazy module is there with its first attribute
    importlib.import_module("dflashctl.views")


@dataclass(frozen=True)
class Session:
    """One command's view of the world. Nothing is contacted before `client` is used."""

    settings: Settings
    store: DestinationStore
    remembered: Destination | None
    directory: Path
    verbose: bool = False

    @classmethod
    def open(
        cls,
        flags: Mapping[str, str | None],
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        verbose: bool = False,
    ) -> Session:
        """Resolve everything that can be judged without contact. Raises usage errors."""
        environment = os.environ if environment is None else environment
        directory = Path.cwd() if directory is None else directory
        store = DestinationStore(state_directory(environment))
        settings = resolve(flags, environment, find_project_file(directory), user_file(environment))
        # --ct alone is a container of a host that a lower layer names, not one of the host deployed to last.
        if not settings.is_given("host") and not settings.is_given("ct"):
            settings = with_destination(settings, store.current())
        remembered = store.get(settings["host"], settings["ct"])
        return cls(with_destination(settings, remembered), store, remembered, directory, verbose)

    @cached_property
    def source(self) -> Source:
        """The tree to deploy, and to take presets and a first agent from."""
        return find_source(self.settings.path("source"), self.directory)

    @property
    def deployed_source(self) -> Source:
        """The tree that the deployed release was made of, for its presets; `source` where there is none any more."""
        if self.remembered is not None and self.release and is_source(Path(self.remembered.source)):
            return Source(Path(self.remembered.source), "deployed last")
        return self.source

    def provenance(self) -> dict[str, str]:
        """Return what is known of the deployed release's origin, as it was when it was deployed."""
        known = self.remembered
        if known is None or not self.release:
            return {}
        return {"directory": known.source, "revision": known.revision, "dirty": known.dirty}

    @property
    def python(self) -> str:
        """The interpreter at the far end."""
        return self.settings["python"] or default_python(self.settings.is_here)

    @property
    def release(self) -> str:
        """The release deployed there, "" when none is known under this root."""
        # A release lies under one root: with another --root it is not there, and asking for it would cost a call.
        if self.remembered is None or self.settings["root"] != self.remembered.root:
            return ""
        return self.remembered.release

    @property
    def label(self) -> str:
        """The destination as a person would call it."""
        host, ct = self.settings["host"], self.settings["ct"]
        return f"container {ct} on {host}" if ct else host

    @cached_property
    def transport(self) -> Transport:
        return make_transport(self.settings["host"], self.settings["ct"], self.settings["ssh_config"])

    @cached_property
    def client(self) -> AgentClient:
        """The agent of this destination."""
        return AgentClient(
            self.transport,
            python=self.python,
            root=self.settings["root"],
            release=self.release,
            pyz=self._build_pyz,
            trace=self._trace,
            meanwhile=_prepare_to_show,
        )

    def _trace(self, text: str) -> None:
        if self.verbose:
            ERR.line(ERR.style(f"> {text}", "dim"))

    def _build_pyz(self) -> bytes:
        from dflashctl.release import build_pyz

        return build_pyz(self.source.directory)

    def destination(self) -> Destination:
        """Return what is known of this destination, to be extended and remembered."""
        settings = self.settings
        base = self.remembered or Destination(settings["host"], settings["ct"])
        return dataclasses.replace(base, python=self.python, ssh_config=settings["ssh_config"])

    def remember(self, destination: Destination, *, make_current: bool) -> None:
        """Store `destination`; where that fails, warn: the work over there is done, and must not look as if it were not."""
        try:
            self.store.remember(destination, make_current=make_current)
        except DflashError as error:
            ERR.line(harmless(f"warning: this destination is not remembered: {error.error} ({error.cause})"))
            ERR.line(harmless(f"  hint: {error.hint}; until then verbs need --host, --ct and --root"))

    def after_deploy(self, known: Destination) -> Session:
        """Return this session as the next command would open it, over the same connection."""
        after = dataclasses.replace(self, settings=with_destination(self.settings, known), remembered=known)
        # A cached property, filled by hand: a new connection through two hops costs a second.
        after.__dict__["transport"] = self.transport
        return after

    def here(self, status: RunStatus) -> RunStatus:
        """Return `status` with this destination's name: the far end does not know how it is reached."""
        return dataclasses.replace(status, host=self.settings["host"], ct=self.settings["ct"])
