"""Learning host keys: what each hop shows, what is known of it, and how a key that somebody compared is written down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dflashctl.errors import NoAnswer
from dflashctl.transport.knownhosts import Changed, Entry, HostKey, Revoked, Trusted, Verdict, learn
from dflashctl.transport.sshconfig import Hop, behind_host, resolve
from dflashctl.transport.sshlink import Link, look_up
from dflashctl.transport.sshsentences import refused
from remote.protocol.errors import usage_error


@dataclass(frozen=True)
class Sighting:
    """The key that a hop showed, and what the operator's files made of it then."""

    hop: Hop
    key: HostKey
    verdict: Verdict
    destination: str

    @property
    def state(self) -> str:
        """known, changed or new."""
        if isinstance(self.verdict, Trusted):
            return "known"
        return "changed" if self.old else "new"

    @property
    def old(self) -> tuple[Entry, ...]:
        """The lines that hold other keys of this hop."""
        return self.verdict.entries if isinstance(self.verdict, Changed) else ()

    @property
    def known_from(self) -> str:
        """FILE:LINE of a key that is known."""
        return self.verdict.entry.place if isinstance(self.verdict, Trusted) else ""

    def must_be_replaceable(self, replace: bool) -> None:
        """Raise what `open` would for a changed key unless `replace`, and for a revoked key always."""
        if isinstance(self.verdict, Revoked) or (self.old and not replace):
            raise refused(self.hop, self.key, self.verdict, self.destination)

    def must_be_one_of(self, fingerprints: Sequence[str]) -> None:
        """Raise NoAnswer unless somebody gave this key's fingerprint."""
        if self.key.fingerprint not in fingerprints:
            raise NoAnswer(
                f"{self.hop.label} shows another key than --fingerprint",
                cause=f"it is {self.key}",
                hint="do not connect before you know why: this may be another machine",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints for this hop."""
        return {
            "host": self.hop.host,
            "port": self.hop.port,
            "name": self.hop.key_name,
            "type": self.key.kind,
            "fingerprint": self.key.fingerprint,
            "state": self.state,
            "file": str(self.hop.known_hosts[0]) if self.hop.known_hosts else "",
            "old": [{"fingerprint": entry.key.fingerprint, "place": entry.place} for entry in self.old],
        }


def sightings(destination: str, config_file: str) -> Iterator[Sighting]:
    """Yield what each hop shows, gateways first; the caller trusts one before it asks for the next.

    Raises NoAnswer where a hop cannot be reached, and for a gateway that is still not trusted.
    """
    hops = resolve(destination, config_file)
    words = behind_host(destination, config_file)
    link = Link(words)
    try:
        for hop in hops:
            key = link.host_key(hop)
            yield Sighting(hop, key, look_up(hop, key), words)
            if hop.is_gateway:
                link.add(hop)
    finally:
        link.close()


def trust(sighting: Sighting) -> str:
    """Write the key into the first UserKnownHostsFile, in place of the old one; return that file's path."""
    hop = sighting.hop
    if not hop.known_hosts:
        raise usage_error(
            f"there is no file to keep the host key of {hop.label} in",
            cause="the ssh configuration says UserKnownHostsFile none",
            hint="name a file there",
        )
    path = hop.known_hosts[0]
    elsewhere = [entry.place for entry in sighting.old if entry.path != path]
    if elsewhere:
        # Adding alone would leave the old key trusted.
        raise NoAnswer(
            f"the old key of {hop.label} cannot be replaced",
            cause=f"it stands in {', '.join(elsewhere)}, and dflashctl writes {path} only",
            hint="take it out there by hand, then repeat this",
        )
    learn(path, hop.key_name, sighting.key, hashed=hop.hash_names, replace=bool(sighting.old))
    return str(path)
