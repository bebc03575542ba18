"""What `deploy` remembers about where it shipped to, so that the verbs after it need no flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflashctl.home import locked, replace_file
from remote.protocol.codec import dumps, from_plain, loads_object
from remote.protocol.errors import DflashError, usage_error

SCHEMA = 1


@dataclass(frozen=True)
class Destination:
    """One place runs live at. `root` is absolute, as the far end resolved it; `release` is what was deployed
    last, and `source`, `revision`, `dirty` say what it was made of."""

    host: str = "local"
    ct: str = ""
    root: str = ""
    python: str = ""
    ssh_config: str = ""
    release: str = ""
    source: str = ""
    revision: str = ""
    dirty: str = ""
    config: str = ""
    """Path of the configuration that the last `start --config` used here."""

    @property
    def key(self) -> str:
        """Its name in destinations.json."""
        return f"{self.host}/{self.ct}" if self.ct else self.host


@dataclass(frozen=True)
class Destinations:
    """All of them, and the one verbs use without --host."""

    schema: int = SCHEMA
    current: str = ""
    known: tuple[Destination, ...] = ()

    def get(self, key: str) -> Destination | None:
        """Return the destination of that key."""
        return next((destination for destination in self.known if destination.key == key), None)


class DestinationStore:
    """destinations.json in the operator's state directory; written whole, under a lock."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "destinations.json"

    def load(self) -> Destinations:
        """Return what is remembered. Raises DflashError when the file is there but is none of ours."""
        try:
            return from_plain(Destinations, loads_object(self.path.read_bytes()))
        except FileNotFoundError:
            return Destinations()
        except (ValueError, OSError) as error:
            raise DflashError(
                f"cannot read {self.path}",
                cause=str(error),
                hint="remove the file and deploy again: it holds nothing else",
            ) from error

    def current(self) -> Destination | None:
        """Return the destination of the last deploy, None before the first."""
        remembered = self.load()
        found = remembered.get(remembered.current)
        if found is None and remembered.current:
            # Falling back to this machine would start a run where nobody wanted one.
            raise usage_error(
                f"{self.path} says that {remembered.current} is used, and does not know it",
                cause="it was edited, or cut short",
                hint="name the destination with --host (and --ct), or deploy again",
            )
        return found

    def get(self, host: str, ct: str) -> Destination | None:
        """Return what is remembered of one destination."""
        return self.load().get(Destination(host, ct).key)

    def remember(self, destination: Destination, *, make_current: bool) -> None:
        """Store `destination`, in place of what was known of it. Raises DflashError when the file cannot be written."""
        try:
            with locked(self.path.with_suffix(".lock")):
                # Read under the lock: two deploys at once must not forget one another's destination.
                old = self.load()
                if old.schema > SCHEMA:
                    # It opens, but what this version does not know would be lost when it writes.
                    raise usage_error(
                        f"cannot write {self.path}",
                        cause=f"a newer dflashctl wrote it (schema {old.schema}, this one knows {SCHEMA})",
                        hint="use the newer dflashctl, or another state directory in DFLASHCTL_HOME",
                    )
                others = tuple(other for other in old.known if other.key != destination.key)
                current = destination.key if make_current else old.current
                data = dumps(Destinations(current=current, known=(*others, destination)), indent=1)
                replace_file(self.path, data + "\n")
        except OSError as error:
            raise DflashError(
                f"cannot write {self.path}",
                cause=str(error),
                hint="make its directory writable, or name another one in DFLASHCTL_HOME",
            ) from error
