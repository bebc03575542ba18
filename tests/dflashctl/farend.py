"""A far end in this process: reads the request as the agent does and answers with frames, for the Memory transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dflashctl.transport.memory import Memory
from remote.protocol.frames import Frame, FrameParser, Kind, json_frame

Play = Callable[[str, dict[str, Any], bytes], Iterable["tuple[Kind, Any] | bytes | Exception"]]
"""Gets verb, request and everything sent; yields (kind, payload), raw bytes, or an exception for the channel to raise."""

HELLO = (Kind.HELLO, {"protocol": 1, "agent": "", "python": "3.11.2", "root": "/far/root", "time": 0.0})


def strip_agent(argv: Sequence[str], sent: bytes) -> bytes:
    """Return what follows the agent that the loader reads, or all of it."""
    if argv[2] != "-c":
        return sent
    length, _, rest = sent.partition(b"\n")
    return rest[int(length) :]


def far_end(play: Play, *, stderr: str = "") -> Memory:
    """Return a transport whose far end plays `play` for every call."""

    def handler(argv: Sequence[str], sent: bytes) -> Iterator[bytes | Exception]:
        request, *_ = FrameParser().feed(strip_agent(argv, sent))
        for item in play(argv[-1], request.json(), sent):
            if isinstance(item, bytes | Exception):
                yield item
            elif item[0] is Kind.DATA:
                yield Frame(request.nonce, Kind.DATA, item[1]).encode()
            else:
                yield json_frame(request.nonce, item[0], item[1]).encode()

    return Memory(handler, stderr=stderr)
