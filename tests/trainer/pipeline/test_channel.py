"""The messages of a pair: whole, in order, and a goodbye that no death can be taken for."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.pipeline import channel
from trainer.pipeline.channel import MessageKind, PairChannel, PeerDied, SlotMessage

BYE = SlotMessage(MessageKind.BYE)
Ends = tuple[PairChannel, PairChannel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = PairChannel(one, "drafter 0"), PairChannel(other, "target 0")
    yield pair
    for end in pair:
        end.close()


def in_threads(*work) -> None:
    """Run the calls side by side; a deadlock fails instead of hanging."""
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads), "deadlock"


@given(st.sampled_from(MessageKind), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_message_survives_the_socket(kind: MessageKind, slot: int, batch: int) -> None:
    message = SlotMessage(kind, slot, batch)
    assert SlotMessage.unpack(message.pack()) == message
    assert len(message.pack()) == 16


@given(st.binary(max_size=40))
def test_anything_else_is_no_message(data: bytes) -> None:
    if len(data) == 16 and int.from_bytes(data[:4], "little") in (1, 2, 3):
        assert SlotMessage.unpack(data).pack() == data
    else:
        with pytest.raises(ValueError):
            SlotMessage.unpack(data)


def test_messages_stay_whole_and_in_order(ends: Ends) -> None:
    sent = [SlotMessage(MessageKind.READY, slot, 10 + slot) for slot in range(20)]
    for message in sent:
        ends[0].send(message)
    assert [ends[1].receive() for _ in sent] == sent


def test_poll_takes_what_is_there_and_never_waits(ends: Ends) -> None:
    assert ends[1].poll() is None
    ends[0].send(SlotMessage(MessageKind.FREE, 1, 2))
    assert ends[1].poll() == SlotMessage(MessageKind.FREE, 1, 2)
    assert ends[1].poll() is None


def test_end_of_file_without_goodbye_is_a_death(ends: Ends) -> None:
    ends[0].close()
    for call in (ends[1].receive, ends[1].poll):
        with pytest.raises(PeerDied, match="target 0"):
            call()
    with pytest.raises(PeerDied):
        ends[1].send(BYE)


def test_a_peer_that_dies_with_unread_messages_is_dead_too(ends: Ends) -> None:
    ends[1].send(BYE)  # Never read: the kernel answers with a reset instead of an end of file.
    ends[0].close()
    with pytest.raises(PeerDied):
        ends[1].receive()


def test_a_killed_process_is_a_death(ends: Ends) -> None:
    pid = os.fork()
    if pid == 0:
        ends[1].close()
        signal.pause()
        os._exit(0)
    peer = ends[1]
    ends[0].close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(PeerDied):
        peer.receive()


def test_goodbyes_may_cross(ends: Ends) -> None:
    def leave(end: PairChannel) -> None:
        end.say_goodbye()
        end.wait_goodbye()

    in_threads(lambda: leave(ends[0]), lambda: leave(ends[1]))


def test_a_goodbye_that_a_worker_read_is_not_waited_for_again(ends: Ends) -> None:
    # Both ends' threads read the other's BYE before their main threads wait: neither may wait for a second one.
    for end in ends:
        end.say_goodbye()
    assert [end.receive().kind for end in ends] == [MessageKind.BYE] * 2
    in_threads(ends[0].wait_goodbye, ends[1].wait_goodbye)


def test_what_is_still_on_its_way_does_not_hide_the_goodbye(ends: Ends) -> None:
    for slot in range(5):
        ends[0].send(SlotMessage(MessageKind.FREE, slot))
    ends[0].say_goodbye()
    in_threads(ends[1].wait_goodbye)


def test_saying_goodbye_to_the_dead_is_no_error(ends: Ends) -> None:
    ends[0].close()
    ends[1].say_goodbye()
    ends[1].wait_goodbye()


def test_connect_waits_for_a_late_listener(tmp_path: Path) -> None:
    address = tmp_path / "pair"
    found: list[PairChannel] = []
    thread = threading.Thread(target=lambda: found.append(channel.connect(address, "drafter 0", 5)))
    thread.start()
    peer = channel.accept(channel.listen(address), "target 0", 5)
    thread.join()
    found[0].send(BYE)
    assert peer.receive() == BYE
    for end in (peer, *found):
        end.close()


def test_both_ends_give_up_on_a_peer_that_never_comes(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="drafter 3"):
        channel.connect(tmp_path / "nobody", "drafter 3", 0.05)
    with pytest.raises(TimeoutError):
        channel.accept(channel.listen(tmp_path / "pair"), "target 0", 0.05)


def test_a_lost_peer_is_named_with_its_rank() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = PairChannel(near, "drafter 0 (rank 5)", rank=5)
    far.close()
    for lost in (end.receive, end.poll, lambda: end.send(BYE)):
        with pytest.raises(PeerDied, match=r"drafter 0 \(rank 5\)") as caught:
            lost()
        assert caught.value.rank == 5
    end.close()
