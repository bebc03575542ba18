"""Commands through a real sshd: bytes go through unchanged, every wait ends, nothing of argv is executed."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl.errors import NoAnswer
from dflashctl.transport import Channel, ChannelClosed, Silence, Transport


@pytest.fixture
def python(ssh):
    """Return a function that runs a Python program behind ssh."""
    channels = []

    def run(program, *arguments):
        channels.append(ssh.open([sys.executable, "-IS", "-c", program, *arguments]))
        return channels[-1]

    yield run
    for channel in channels:
        channel.close()


def read_all(channel):
    data = bytearray()
    while piece := channel.receive(10):
        data += piece
    return bytes(data)


def test_it_is_a_transport_and_its_channels_are_channels(ssh):
    transport: Transport = ssh
    channel: Channel = transport.open(["echo", "hello"])
    assert read_all(channel) == b"hello\n"
    channel.close()
    channel.close()


def test_bytes_go_through_unchanged_in_both_directions(python):
    payload = bytes(range(256)) * 40_000
    channel = python("import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)")
    # Ten megabytes each way: more than both windows hold, so sending has to take in what comes back.
    channel.send(payload, 10)
    channel.finish()
    assert read_all(channel) == payload


def test_a_flood_on_stderr_does_not_block_stdout_and_its_end_is_kept(python):
    channel = python("import sys; sys.stderr.write('x' * 12_000_000 + 'last words'); print('done')")
    assert read_all(channel) == b"done\n"
    assert channel.diagnostics().endswith("last words")
    assert len(channel.diagnostics()) <= 4096


def test_silence_is_bounded_in_both_directions(python):
    channel = python("import time; time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(Silence):
        channel.receive(0.2)
    with pytest.raises(Silence):
        channel.send(b"x" * 10_000_000, 0.3)
    assert time.monotonic() - began < 10


def test_a_slow_reader_is_no_silence(python):
    reads = "import sys, time\nfor _ in range(12): sys.stdin.buffer.read(1_000_000); time.sleep(0.3)\nprint('all')"
    channel = python(reads)
    # Twelve pauses of 0.3 s: more in total than the time-out, which counts from the last progress and has to be longer
    # than Python takes to start on a busy machine.
    channel.send(b"x" * 12_000_000, 3.0)
    assert read_all(channel) == b"all\n"


def test_a_command_that_ended_is_told_apart_and_its_words_are_kept(python):
    channel = python("import sys; print('no', flush=True); print('why', file=sys.stderr); sys.exit(3)")
    assert channel.receive(10) == b"no\n"
    assert channel.receive(10) == b""
    with pytest.raises(ChannelClosed):
        channel.send(b"x" * 50_000_000, 10)
    assert channel.receive(1) == b""
    assert channel.diagnostics() == "why"


def test_words_on_stderr_alone_are_waited_for(python):
    channel = python("import sys, os; os.close(1); print('why', file=sys.stderr, flush=True); sys.stdin.read()")
    channel.finish()
    assert (read_all(channel), channel.diagnostics()) == (b"", "why")


def test_after_finish_nobody_reads(python):
    channel = python("import sys; print(len(sys.stdin.read()))")
    channel.send(b"12345", 5)
    channel.finish()
    channel.finish()
    with pytest.raises(ChannelClosed):
        channel.send(b"x", 1)
    assert read_all(channel) == b"5\n"


def test_memory_stays_flat_however_much_comes(ssh):
    channel = ssh.open(["head", "-c", "60000000", "/dev/zero"])
    channel.receive(10)
    # Nobody reads for a while: what is on its way is bounded by the window, not by the far end's zeal.
    time.sleep(0.5)
    tracemalloc.start()
    try:
        total = 0
        while piece := channel.receive(10):
            total += len(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total > 50_000_000
    assert peak < 20_000_000
    channel.close()


def test_closing_is_no_end_of_the_connection(ssh):
    first = ssh.open(["cat"])
    second = ssh.open(["cat"])
    first.close()
    second.send(b"still here", 5)
    second.finish()
    assert read_all(second) == b"still here"
    second.close()


def test_eight_commands_at_once_and_no_more(ssh):
    channels = [ssh.open(["cat"]) for _ in range(8)]
    with pytest.raises(NoAnswer) as caught:
        ssh.open(["true"])
    assert "8 commands" in caught.value.error
    channels.pop().close()
    channels.append(ssh.open(["echo", "room again"]))
    assert read_all(channels[-1]) == b"room again\n"
    for channel in channels:
        channel.close()


def test_no_terminal_no_agent_no_environment_of_ours(ssh, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nonexistent")
    monkeypatch.setenv("LC_MINE", "leaks")
    channel = ssh.open(["sh", "-c", "test -t 0 || test -t 1 || env"])
    environment = read_all(channel).decode()
    assert "SSH_CONNECTION=" in environment
    assert "SSH_AUTH_SOCK" not in environment
    assert "LC_MINE" not in environment
    channel.close()


def test_connecting_from_several_threads_makes_one_connection(ssh, shared_sshd):
    before = shared_sshd.log().count("Accepted publickey")
    answers = []

    def ask():
        channel = ssh.open(["echo", "x"])
        answers.append(read_all(channel))
        channel.close()

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == [b"x\n"] * 6
    assert shared_sshd.log().count("Accepted publickey") == before + 1


# Everything but NUL, which no argv can hold.
ARGUMENTS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=5
)
NASTY = [
    "'",
    '"',
    "\\",
    "$(touch HIT)",
    "`touch HIT`",
    "; touch HIT",
    "\n",
    "!!",
    "~",
    "*",
    "--",
    "-x",
    "",
    "é",
    "#",
    "%s",
    "\r",
]
DUMP = "import sys, json; json.dump([a.encode('utf-8', 'surrogateescape').hex() for a in sys.argv[1:]], sys.stdout)"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(st.sampled_from(NASTY), max_size=4) | ARGUMENTS)
def test_any_argv_arrives_unchanged(ssh, arguments):
    channel = ssh.open([sys.executable, "-IS", "-c", DUMP, *arguments])
    arrived = [bytes.fromhex(text).decode() for text in json.loads(read_all(channel))]
    channel.close()
    assert arrived == arguments


def test_nothing_of_argv_is_executed(ssh, tmp_path):
    hit = tmp_path / "hit"
    nasty = [
        f"$(touch {hit})",
        f"`touch {hit}`",
        f"'; touch {hit}; '",
        f"\n touch {hit}\n",
        f"|| touch {hit}",
        f"> {hit}",
    ]
    channel = ssh.open([sys.executable, "-IS", "-c", "import sys; print(len(sys.argv))", *nasty])
    assert read_all(channel) == b"7\n"
    assert not hit.exists()
    channel.close()


def test_an_argument_with_nul_is_refused_here(ssh):
    with pytest.raises(ValueError, match="null"):
        ssh.open(["echo", "a\0b"])


def test_a_cut_connection_is_the_end_of_the_stream(operator, sshd):
    operator.configure(sshd)
    operator.knows(sshd)
    ssh = operator.ssh(sshd)
    channel = ssh.open(["cat"])
    channel.send(b"x", 5)
    assert channel.receive(5) == b"x"
    sshd.kill_sessions()
    assert channel.receive(10) == b""
    assert channel.receive(10) == b""
    channel.close()
    # The next command comes with a new connection.
    again = ssh.open(["echo", "back"])
    assert read_all(again) == b"back\n"
    again.close()


def test_a_hash_of_much_data_comes_back_right(ssh):
    data = hashlib.sha256(b"seed").digest() * 500_000
    channel = ssh.open(["sha256sum"])
    channel.send(data, 10)
    channel.finish()
    assert read_all(channel).split()[0].decode() == hashlib.sha256(data).hexdigest()
    channel.close()
