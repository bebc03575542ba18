"""The verb doctor against a real agent: every line, whatever of the others fails, and in one call."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote.agent import doctor as module
from remote.agent.doctor import Examination, Wanted
from remote.agent.finding import Finding, gib
from remote.protocol.codec import from_plain
from remote.protocol.layout import RootLayout
from tests.remote.conftest import REPOSITORY

LINES = ["python", "GPUs", "model", "memory", "data", "space"]
PREFLIGHT = """\
import json, sys, time
assert sys.argv[1:5] == ["preflight", "--config-json", sys.argv[3], "--json"], sys.argv
config = json.load(open(sys.argv[3]))
time.sleep(config.get("pause", 0))
print(json.dumps(config["said"]).replace("FLAGS", " ".join(sys.argv[5:])))
sys.exit(config["said"].get("code", 0))
"""


def findings(reply) -> dict[str, Finding]:
    listed = [from_plain(Finding, event["finding"]) for event in reply.events if "finding" in event]
    assert reply.result == {"findings": len(listed)}
    return {finding.name: finding for finding in listed}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A tiny target, data for it, and the configuration that names them."""
    from trainer import toy

    folder = tmp_path_factory.mktemp("toy")
    toy.make_toy_target(folder / "target")
    # Training reads ids, so the toy has no tokenizer; a real one has.
    (folder / "target/tokenizer.json").write_text("{}")
    toy.make_toy_data(folder / "data.jsonl", documents=40)
    return {**toy.toy_config(folder / "target", folder / "data.jsonl"), "device": "cpu"}


@pytest.fixture
def trained(far):
    """A far end whose release has the real trainer."""
    folder = REPOSITORY / "trainer"
    files = {path.relative_to(folder.parent).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}
    assert far.deploy({**far.files(), **files}).result
    return far


@pytest.fixture
def stubbed(far):
    """A far end whose preflight says what the configuration's key `said` holds."""
    assert far.deploy(far.files(__main__=PREFLIGHT)).result
    return far


def test_everything_is_there(trained, toy):
    found = findings(trained.call("doctor", python=sys.executable, config=toy))
    assert list(found) == LINES
    assert {name: finding.state for name, finding in found.items()} == dict.fromkeys(LINES, "ok"), found
    assert "torch 2." in found["python"].text
    assert "columns input_ids" in found["data"].text
    assert "40 documents" in found["data"].text
    assert "checkpoints" in found["space"].text


def test_the_real_preflight_fails_the_line_it_is_about(trained, toy, tmp_path):
    data = tmp_path / "words.jsonl"
    data.write_text('{"text": "hello"}\n')
    found = findings(trained.call("doctor", python=sys.executable, config=toy | {"data_dir": str(data)}))
    assert list(found) == LINES
    assert [name for name, finding in found.items() if finding.state == "failed"] == ["data"]
    assert "columns seen: text" in found["data"].text
    other = findings(trained.call("doctor", python=sys.executable, config=toy | {"mask_token_id": 10**6}))
    assert [name for name, finding in other.items() if finding.state == "failed"] == ["preflight"]
    assert other["data"].text.endswith("read whole")


def test_a_model_that_is_gone_does_not_hide_the_data(trained, toy, tmp_path):
    data = tmp_path / "words.jsonl"
    data.write_text('{"text": "hello"}\n')
    gone = toy | {"target_model": "/dev/shm/no-such-model"}
    found = findings(trained.call("doctor", python=sys.executable, config=gone))
    assert [name for name, finding in found.items() if finding.state == "failed"] == ["model"]
    assert found["data"].text.endswith("read whole")
    found = findings(trained.call("doctor", python=sys.executable, config=gone | {"data_dir": str(data)}))
    assert [name for name, finding in found.items() if finding.state == "failed"] == ["model", "data"]
    assert list(found) == LINES


def test_what_only_the_trainer_sees_of_a_model_is_told(trained, toy, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(toy["target_model"], folder)
    (folder / "generation_config.json").write_text("{")
    found = findings(trained.call("doctor", python=sys.executable, config=toy | {"target_model": str(folder)}))
    assert (found["model"].state, found["preflight"].state) == ("ok", "failed")
    assert "generation_config.json" in found["preflight"].text


@pytest.mark.parametrize("key", ["target_model", "data_dir"])
def test_a_key_that_is_not_set_is_said_once(trained, toy, key):
    found = findings(trained.call("doctor", python=sys.executable, config=toy | {key: ""}))
    assert list(found) == LINES
    failed = [finding.text for finding in found.values() if finding.state == "failed"]
    assert failed == [f"{key} is not set"]


def test_before_the_first_deploy(bare, toy):
    found = findings(bare.call("doctor", python=sys.executable, config=toy))
    assert [name for name, finding in found.items() if finding.state != "ok"] == ["data"]
    assert (found["data"].state, found["data"].hint) == ("warning", "run `dflashctl deploy` first")
    assert not bare.root.path.exists()


def test_without_a_configuration(bare):
    found = findings(bare.call("doctor", python=sys.executable))
    assert list(found) == LINES
    assert {found[name].hint for name in ("model", "data")} == {"name one with --config FILE"}
    assert "failed" not in {finding.state for finding in found.values()}


def test_one_thing_that_lacks_hides_no_other(stubbed, tmp_path):
    config = {
        "target_model": "/dev/shm/gone",
        "data_dir": str(tmp_path / "none"),
        "device": "cuda",
        "target_gpus": [0],
        "drafter_gpus": [1],
        "said": {},
    }
    stubbed.environment["PATH"] = str(tmp_path)
    found = findings(stubbed.call("doctor", python="/nonexistent/python3", config=config))
    assert list(found) == LINES
    failed = [name for name, finding in found.items() if finding.state == "failed"]
    assert failed == ["python", "GPUs", "model", "data"]
    assert {found[name].code for name in failed} == {7}
    assert all(found[name].hint for name in failed)


def test_findings_come_one_by_one_while_a_slow_one_is_waited_for(stubbed, toy):
    config = toy | {"pause": 30, "said": {}}
    call = stubbed.begin("doctor", python=sys.executable, config=config)
    seen = []
    call.until(lambda frame: b'"finding"' in frame.payload and (seen.append(frame.json()) or len(seen) == 4))
    # The preflight sleeps on; what was known before it is here.
    assert [event["finding"]["name"] for event in seen] == LINES[:4]
    assert call.process.poll() is None
    call.kill()


def test_a_long_wait_is_explained_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    answer = type("Answer", (), {"say": lambda self, text: said.append(text)})()
    look = Examination(RootLayout(tmp_path), {}, Wanted(), "", "", answer)._word_of_patience()
    look()
    look()
    assert (len(said), "data set" in said[0]) == (1, True)


def test_a_trainer_that_does_not_run_is_told_with_its_code(far, toy):
    assert far.deploy(far.files(__main__="raise SystemExit(9)")).result
    found = findings(far.call("doctor", python=sys.executable, config=toy))
    assert found["preflight"].state == "failed"
    assert "ended with code 9" in found["preflight"].text
    assert found["data"].state == "warning"


def test_space_that_the_preflight_lacks(stubbed, toy):
    said = {"error": "no space left for checkpoints", "cause": "/out has 1 MiB", "hint": "free some", "code": 7}
    found = findings(stubbed.call("doctor", python=sys.executable, config=toy | {"said": said}))
    assert [name for name, finding in found.items() if finding.state == "failed"] == ["space"]
    assert "/out has 1 MiB" in found["space"].text
    assert found["data"].state == "ok"


@pytest.mark.parametrize(("device", "flags"), [("cuda", "--skip-devices"), ("cpu", "")])
def test_gpus_that_failed_are_not_told_twice(stubbed, toy, tmp_path, device, flags):
    stubbed.environment["PATH"] = str(tmp_path)
    config = toy | {"device": device, "said": {"error": "flags:FLAGS.", "code": 7}}
    found = findings(stubbed.call("doctor", python=sys.executable, config=config))
    assert (found["GPUs"].state == "failed", found["preflight"].text) == (device == "cuda", f"flags:{flags}.")


def test_what_cannot_be_looked_at_is_a_finding(stubbed, toy, tmp_path):
    too_long = str(tmp_path / ("x" * 300) / "model")
    found = findings(stubbed.call("doctor", python=sys.executable, config=toy | {"target_model": too_long, "said": {}}))
    assert found["model"].state == "failed"
    assert "File name too long" in found["model"].text
    assert found["space"].state == "ok"


@pytest.mark.parametrize(
    "config", [{"target_model": 3}, {"target_gpus": ["a"]}, {"ring_mib": "x"}, {"data_dir": "a\0b"}, {"device": None}]
)
def test_a_configuration_that_is_none_is_a_usage_error(far, config):
    error = far.call("doctor", config=config).error
    assert (error["code"], error["error"]) == (2, "the configuration is not usable")


def test_it_changes_nothing(stubbed, toy):
    before = sorted(str(path) for path in stubbed.root.path.rglob("*") if "__pycache__" not in path.parts)
    findings(stubbed.call("doctor", python=sys.executable, config=toy | {"said": {}}))
    after = sorted(str(path) for path in stubbed.root.path.rglob("*") if "__pycache__" not in path.parts)
    assert after == before


def test_a_release_that_was_removed_says_so(stubbed, toy):
    shutil.rmtree(stubbed.root.releases)
    found = findings(stubbed.call("doctor", python=sys.executable, config=toy))
    assert "not read: nothing is deployed there" in found["data"].text


def test_weights_have_to_fit_the_smallest_gpu_of_a_target(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nprintf '0, A, 0, 8000\\n1, B, 0, 4000\\n2, C, 0, 10\\n'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    wanted = Wanted(device="cuda", target_gpus=(0, 1), drafter_gpus=(2,))
    assert Examination(RootLayout(tmp_path), {}, wanted, "", "", None)._room() == (4000 << 20, "GPU 1")
    script.write_text("#!/bin/sh\nexit 1\n")
    assert Examination(RootLayout(tmp_path), {}, wanted, "", "", None)._room() == (0, "")


def test_shared_roles_need_no_ring():
    assert Wanted(target_gpus=(0,), drafter_gpus=(0,), ring_mib=5).ring_bytes == 0
    assert Wanted(target_gpus=(0,), drafter_gpus=(1,), ring_mib=5).ring_bytes == 5 << 20
    assert Wanted(device="cpu", target_gpus=(0,)).devices == []
    assert Wanted(device="cuda", target_gpus=(10, 2), drafter_gpus=(2, 3)).devices == ["2", "3", "10"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.text(st.characters(exclude_characters="\0"), max_size=20)
    | st.sampled_from(["/", "/proc/self/mem", "/dev/null", "/proc", "x" * 5000, "~", "\ud800"]),
    device=st.sampled_from(["cpu", "cuda", "", "tpu"]),
    gpus=st.lists(st.integers(-3, 2**40), max_size=3),
    number=st.integers(-(2**40), 2**40),
)
def test_any_configuration_gives_lines_and_no_traceback(tmp_path, path, device, gpus, number):
    config = {"target_model": path, "data_dir": path, "output_dir": path, "device": device, "keep_checkpoints": number}
    config |= {"target_gpus": gpus, "drafter_gpus": [0], "ring_mib": number}
    wanted = from_plain(Wanted, json.loads(json.dumps(config)))
    listed = list(Examination(RootLayout(tmp_path), config, wanted, "/nonexistent", "", None))
    assert [finding.name for finding in listed] == LINES
    assert all(finding.text for finding in listed)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.0 GiB"), (5 << 20, "5 MiB"), (1 << 30, "1.0 GiB"), (3 << 40, "3,072.0 GiB")]
)
def test_sizes(count, text):
    assert gib(count) == text
