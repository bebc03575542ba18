"""A relay on loopback that lets so many bytes of a server through and then freezes, cuts or garbles the connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping


class Relay:
    """Listens on `port` and passes connections on to `target`. `limit`: bytes from the server, None for all of them.

    `garble`: the bit to flip in the server's byte of each number.
    """

    def __init__(
        self,
        target: int,
        *,
        limit: int | None = None,
        cut: bool = False,
        garble: Mapping[int, int] | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.limit = limit
        self.cut = cut
        self.garble = dict(garble or {})
        self.passed = 0
        self.connections = 0
        self._target = target
        self._closing = False
        self._sockets: list[socket.socket] = []
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self.connections += 1
                self.passed = 0
                self._sockets += [client, server]
                for source, sink, counted in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._pass_on, args=(source, sink, counted), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counted and self.limit is not None:
                    data = data[: max(self.limit - self.passed, 0)]
                if counted and self.garble:
                    data = bytes(byte ^ self.garble.get(self.passed + i, 0) for i, byte in enumerate(data))
                sink.sendall(data)
                if counted:
                    self.passed += len(data)
                    if self.limit is not None and self.passed >= self.limit:
                        break
            else:
                sink.shutdown(socket.SHUT_WR)
                return
            if self.cut:
                sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
