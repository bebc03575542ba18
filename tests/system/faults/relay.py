"""A wire on loopback that is cut after so many bytes, both directions counted together."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class _Wire:
    """One connection: two sockets, and how many bytes may go through them (None: any number)."""

    def __init__(self, ends: tuple[socket.socket, socket.socket], limit: int | None) -> None:
        self.ends = ends
        self.passed = 0
        self._limit = limit
        self._lock = threading.Lock()

    @property
    def is_cut(self) -> bool:
        return self._limit is not None and self.passed >= self._limit

    def pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self.is_cut and (data := source.recv(1 << 14)):
                sink.sendall(data[: self._take(len(data))])
        # Both ways at once: who is cut off is not heard any more either.
        self.end()

    def _take(self, count: int) -> int:
        with self._lock:
            allowed = count if self._limit is None else min(count, self._limit - self.passed)
            self.passed += allowed
            return allowed

    def end(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Relay:
    """Passes connections on to `target`. The first one is cut once `cut` bytes went through it; None: never.

    `dead`: after the cut no other connection comes about, until `mend` is called.
    """

    def __init__(self, target: int, cut: int | None = None, *, dead: bool = False) -> None:
        self._target = target
        self._cut = cut
        self._dead = dead
        self.refused = 0
        self._wires: list[_Wire] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._begin(self._accept)

    @property
    def passed(self) -> int:
        """Bytes that went through the first connection."""
        return self._wires[0].passed if self._wires else 0

    @property
    def was_cut(self) -> bool:
        return bool(self._wires) and self._wires[0].is_cut

    @property
    def connections(self) -> int:
        return len(self._wires)

    def mend(self) -> None:
        """From now on everything goes through."""
        self._dead = False

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._dead and self.was_cut:
                    self.refused += 1
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                wire = _Wire((client, server), None if self._wires else self._cut)
                self._wires.append(wire)
                self._begin(wire.pass_on, client, server)
                self._begin(wire.pass_on, server, client)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for wire in self._wires:
            wire.end()
        for thread in self._threads:
            thread.join(5)
        for wire in self._wires:
            for end in wire.ends:
                end.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
