"""Events of many processes in one file; nothing is lost before the writer is there, nothing ends a run that trains well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remote.protocol import events as ev
from trainer.telemetry import EventSender, EventWriter, PhaseLog

ROOT = Path(__file__).resolve().parents[2]


def message(text: str, rank: int = 0) -> ev.Message:
    return ev.Message(time=1.0, rank=rank, level="info", text=text)


def texts(file: Path) -> list[str]:
    return [event.text for event in ev.read_events(file.read_bytes()) if isinstance(event, ev.Message)]


SENDER = """
import sys
from pathlib import Path
from remote.protocol import events as ev
from trainer.telemetry import EventSender
sender = EventSender(Path(sys.argv[1]))
for number in range(200):
    sender.emit(ev.Message(time=1.0, rank=int(sys.argv[2]), level="info", text=f"{number} " + "x" * 500))
sender.close()
assert "torch" not in sys.modules
"""


def test_events_of_several_processes_arrive_whole_and_in_order(tmp_path: Path) -> None:
    file, address = tmp_path / "events.jsonl", tmp_path / "events.sock"
    writer = EventWriter(file, address)
    senders = [
        subprocess.Popen([sys.executable, "-c", SENDER, str(address), str(rank)], cwd=ROOT) for rank in (1, 2, 3)
    ]
    assert [sender.wait(60) for sender in senders] == [0, 0, 0]
    for number in range(50):
        writer.emit(message(f"{number} own"))
    writer.close()
    lines = file.read_bytes().splitlines()
    events = [ev.decode(line) for line in lines]
    assert len(events) == 650
    for rank, count in ((0, 50), (1, 200), (2, 200), (3, 200)):
        numbers = [int(e.text.split()[0]) for e in events if isinstance(e, ev.Message) and e.rank == rank]
        assert numbers == list(range(count))


def test_events_before_the_writer_binds_are_kept(tmp_path: Path) -> None:
    file, address = tmp_path / "events.jsonl", tmp_path / "events.sock"
    sender = EventSender(address)
    for text in "abc":
        sender.emit(message(text))
    writer = EventWriter(file, address)
    sender.emit(message("d"))
    sender.close()
    writer.close()
    assert texts(file) == ["a", "b", "c", "d"]


def test_the_socket_outlives_its_name(tmp_path: Path) -> None:
    file, address = tmp_path / "events.jsonl", tmp_path / "events.sock"
    writer = EventWriter(file, address)
    sender = EventSender(address)
    sender.emit(message("a"))
    address.unlink()
    sender.emit(message("b"))
    sender.close()
    writer.close()
    assert texts(file) == ["a", "b"]


def test_a_sender_survives_the_writers_end(tmp_path: Path) -> None:
    file, address = tmp_path / "events.jsonl", tmp_path / "events.sock"
    writer = EventWriter(file, address)
    sender = EventSender(address)
    sender.emit(message("a"))
    writer.close()
    # The kernel refuses the first and has forgotten the peer at the second.
    for text in "bcd":
        sender.emit(message(text))
    sender.close()
    assert texts(file) == ["a"]


def test_what_waits_for_a_writer_is_bounded(tmp_path: Path) -> None:
    file, address = tmp_path / "events.jsonl", tmp_path / "events.sock"
    sender = EventSender(address)
    for number in range(1500):
        sender.emit(message(str(number)))
    writer = EventWriter(file, address)
    sender.close()
    writer.close()
    assert texts(file) == [str(number) for number in range(500, 1500)]


def test_the_log_line_is_printed_and_reads_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", None)
    writer.emit(message("hello"))
    writer.close()
    parsed = ev.parse_line(capfd.readouterr().out)
    assert parsed is not None
    assert parsed["text"] == "hello"


def test_a_full_disk_is_said_once_and_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    writer = EventWriter(Path("/dev/full"), None)
    for text in "abc":
        writer.emit(message(text))
    writer.close()
    out, err = capfd.readouterr()
    assert err.count("No space left on device") == 1
    assert [ev.parse_line(line)["text"] for line in out.splitlines()] == ["a", "b", "c"]  # pyright: ignore


FULL_LOG = """
import sys
from pathlib import Path
from remote.protocol import events as ev
from trainer.telemetry import EventWriter
writer = EventWriter(Path(sys.argv[1]), None)
for text in "abc":
    writer.emit(ev.Message(time=1.0, level="info", text=text))
writer.close()
"""


def test_a_full_log_ends_nothing_either(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-u", "-c", FULL_LOG, str(tmp_path / "e")],
            cwd=ROOT,
            stdout=full,
            stderr=full,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0
    assert texts(tmp_path / "e") == ["a", "b", "c"]


TORN = """
import resource, signal, sys
from pathlib import Path
from remote.protocol import events as ev
from trainer.telemetry import EventWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = EventWriter(Path(sys.argv[1]), None)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for text, limit in (("a", 150), ("b", 150), ("c", 150), ("d", hard), ("e", hard)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    writer.emit(ev.Message(time=1.0, level="info", text=text * 40))
writer.close()
"""


def test_half_a_line_costs_no_line_but_itself(tmp_path: Path) -> None:
    # A limit on the file's size stands for a disk that fills up in the middle of a line and has room again later.
    done = subprocess.run(
        [sys.executable, "-c", TORN, str(tmp_path / "e")], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(b"cannot be written") == 1
    assert texts(tmp_path / "e") == ["a" * 40, "d" * 40, "e" * 40]


def test_the_observer_sees_own_and_received_events(tmp_path: Path) -> None:
    address = tmp_path / "events.sock"
    seen: list[ev.Event] = []
    writer = EventWriter(tmp_path / "events.jsonl", address)
    writer.observe(seen.append)
    writer.emit(message("own"))
    sender = EventSender(address)
    sender.emit(message("theirs"))
    sender.close()
    writer.close()
    assert seen == [message("own"), message("theirs")]


def test_a_phase_is_reported_at_both_ends_and_remembered_for_a_crash(tmp_path: Path) -> None:
    seen: list[ev.Event] = []
    writer = EventWriter(tmp_path / "events.jsonl", None, observer=seen.append)
    phases = PhaseLog(writer, role="drafter", rank=2)
    assert phases.current == "starting"
    with phases.phase("loading", "target"):
        assert phases.current == "loading"
    with pytest.raises(RuntimeError), phases.phase("training"):
        raise RuntimeError
    assert phases.current == "training"
    writer.close()
    assert [(e.phase, e.detail, e.seconds > 0) for e in seen if isinstance(e, ev.Phase)] == [
        ("loading", "target", False), ("loading", "target", True), ("training", "", False),
    ]  # fmt: skip
