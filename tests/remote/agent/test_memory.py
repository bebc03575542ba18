"""Memory as a container sees it: both versions of cgroups, nested bounds, and files that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.agent import memory as module
from remote.agent.memory import CgroupMemory, Memory, cgroup_memory, memory, memory_finding, parse_information

GIB = 1 << 30


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def test_version_two_in_a_container_of_its_own(tmp_path):
    write(tmp_path, memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=f"anon 1\ninactive_file {GIB}")
    assert cgroup_memory(tmp_path, "0::/\n") == CgroupMemory(8 * GIB, 4 * GIB)


def test_version_two_without_a_bound_is_none(tmp_path):
    write(tmp_path, memory__max="max", memory__current=5 * GIB)
    assert cgroup_memory(tmp_path, "0::/\n") == CgroupMemory()


def test_version_one(tmp_path):
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"inactive_file 7\ntotal_inactive_file {GIB // 4}\ntotal_active_file {GIB // 4}",
    )
    assert cgroup_memory(tmp_path, "4:memory:/\n1:cpu:/other\n0::/\n") == CgroupMemory(2 * GIB, GIB // 2)


def test_version_one_shows_no_bound_as_a_huge_number(tmp_path):
    write(tmp_path / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    assert cgroup_memory(tmp_path, "4:memory:/\n") == CgroupMemory()


def test_of_nested_bounds_the_one_with_the_least_room_counts(tmp_path):
    write(tmp_path / "a", memory__max=10 * GIB, memory__current=9 * GIB)
    write(tmp_path / "a" / "b", memory__max=5 * GIB, memory__current=1 * GIB)
    assert cgroup_memory(tmp_path, "0::/a/b\n") == CgroupMemory(10 * GIB, 9 * GIB)


def test_a_path_of_the_host_that_the_container_cannot_see(tmp_path):
    write(tmp_path, memory__max=GIB, memory__current=1)
    assert cgroup_memory(tmp_path, "0::/lxc/200/ns/../../x\n").limit == GIB


def test_free_is_what_the_kernel_lets_one_have():
    assert Memory(100, 50, 0, 0).free == 50
    assert Memory(100, 50, 30, 10).free == 20
    assert Memory(100, 50, 30, 40).free == 0
    assert Memory(100, 5, 30, 10).free == 5


def test_this_machine_has_memory():
    now = memory()
    assert 0 < now.available <= now.total
    assert 0 < now.free <= now.total


def test_nothing_to_read_is_a_warning_and_no_traceback(tmp_path, monkeypatch):
    assert memory(tmp_path, tmp_path / "none", tmp_path / "none") == Memory(0, 0, 0, 0)
    monkeypatch.setattr(module, "memory", lambda: Memory(0, 0, 0, 0))
    assert memory_finding(0).state == "warning"


@pytest.mark.parametrize(("ring", "state"), [(0, "ok"), (3 * GIB, "ok"), (5 * GIB, "warning")])
def test_a_ring_that_does_not_fit_is_a_warning(monkeypatch, ring, state):
    monkeypatch.setattr(module, "memory", lambda: Memory(64 * GIB, 60 * GIB, 8 * GIB, 4 * GIB))
    found = memory_finding(ring)
    assert (found.state, "4.0 GiB free of 8.0 GiB (cgroup limit)" in found.text) == (state, True)
    assert ("ring_mib" in found.hint) == (state == "warning")


odd = st.text(max_size=30) | st.integers().map(str) | st.sampled_from(["max", "", "9" * 30, "٣", "-1", "1 2", "²"])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limit=odd, used=odd, stat=odd, own=st.text(max_size=40) | st.sampled_from(["0::/", "4:memory:/a/../../..", "::"])
)
def test_whatever_stands_in_those_files(tmp_path, limit, used, stat, own):
    for name, text in (("max", limit), ("current", used), ("stat", stat)):
        (tmp_path / f"memory.{name}").write_text(text, encoding="utf-8", errors="surrogatepass")
    found = cgroup_memory(tmp_path, own.replace("\0", ""))
    assert found.limit >= 0
    assert found.used >= 0


@given(st.text(max_size=200))
def test_any_meminfo(text):
    assert all(value >= 0 for value in parse_information(text).values())
    assert parse_information(f"{text}\nMemTotal:  12 kB\n")["MemTotal"] == 12 * 1024
