"""The far end that tests play has the manners of a real channel."""

from __future__ import annotations

import pytest

from dflashctl.transport import Channel, ChannelClosed, Silence, Transport
from dflashctl.transport.memory import Memory


def test_it_is_a_transport_and_its_channels_are_channels():
    transport: Transport = Memory(lambda argv, sent: [])
    channel: Channel = transport.open(["python", "verb"])
    assert transport.name == "memory"
    channel.close()
    transport.close()


def test_the_handler_sees_argv_and_input_and_its_pieces_come_in_order():
    memory = Memory(lambda argv, sent: [" ".join(argv).encode(), sent, b"last"])
    channel = memory.open(["a", "b"])
    channel.send(b"one ", 1)
    channel.send(b"two", 1)
    channel.finish()
    assert [channel.receive(1) for _ in range(5)] == [b"a b", b"one two", b"last", b"", b""]
    assert (memory.channels, channel.finished) == ([channel], True)


def test_after_finish_nobody_reads():
    channel = Memory(lambda argv, sent: []).open([])
    channel.finish()
    with pytest.raises(ChannelClosed):
        channel.send(b"x", 1)


def test_an_exception_among_the_pieces_is_raised_where_it_stands():
    channel = Memory(lambda argv, sent: [b"a", Silence(), b"b"]).open([])
    assert channel.receive(1) == b"a"
    with pytest.raises(Silence):
        channel.receive(1)
    assert channel.receive(1) == b"b"


def test_stderr_and_close():
    memory = Memory(lambda argv, sent: [], stderr="pct: not found")
    channel = memory.open([])
    assert (channel.diagnostics(), channel.closed) == ("pct: not found", False)
    channel.close()
    assert channel.closed
