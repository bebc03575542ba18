"""The verbs status and runs."""

from __future__ import annotations

import json

from remote.agent.lifecycle import Tail, run_ids
from remote.protocol.events import encode
from remote.protocol.layout import RunLayout
from tests.remote.agent.test_verdict import step


def test_no_run_at_all(bare):
    status = bare.ok("status")
    assert (status["state"], status["run_id"], status["loss"]) == ("none", "", None)
    assert bare.ok("runs") == {"runs": []}
    assert not bare.root.path.exists(), "asking changes nothing"


def test_the_fields_that_scripts_rely_on(far):
    far.running("--pause", "0.02")
    status = far.ok("status")
    assert {"schema", "run_id", "state", "step", "loss", "tokens_per_second", "host", "ct"} <= set(status)
    assert (status["schema"], status["host"], status["ct"]) == (1, "local", "")
    assert status["tokens_per_second"] == 1000.0
    assert status["topology"] == "1 target / 1 drafter"


def test_a_run_that_is_not_there(far):
    for run_id in ("20200101-000000-aaaaaa", "nonsense", "../../etc"):
        assert far.call("status", run=run_id).error["code"] == 3


def test_runs_are_listed_newest_first(far):
    for run_id in ("20200101-000000-aaaaaa", "20300101-000000-bbbbbb", "20210101-000000-cccccc"):
        far.root.run(run_id).create()
    (far.root.runs / "stray").mkdir()
    assert [status["run_id"][:4] for status in far.ok("runs")["runs"]] == ["2030", "2021", "2020"]
    assert len(far.ok("runs", limit=1)["runs"]) == 1
    assert far.call("runs", limit=-1).error["code"] == 2
    assert run_ids(far.root)[0].startswith("2030")


def test_a_file_that_is_named_like_a_run_is_none(far):
    name = "20990101-000000-aaaaaa"
    (far.root.runs / name).touch()
    assert far.ok("runs") == {"runs": []}
    assert far.ok("status")["state"] == "none"
    for verb in ("status", "logs", "stop"):
        assert far.call(verb, run=name).error["code"] == 3
        assert far.call(verb).returncode == 0
    assert far.running()["run_id"] != name
    assert far.ok("status")["step"] > 0


def test_status_without_a_name_means_the_living_run(far):
    far.running()
    far.root.run("20990101-000000-aaaaaa").create()
    assert far.ok("status")["run_id"] == far.ok("runs")["runs"][1]["run_id"]


def test_the_last_step_is_found_behind_many_other_events(tmp_path):
    run = RunLayout(tmp_path / "20200101-000000-aaaaaa")
    run.create()
    filler = json.dumps({"kind": "message", "time": 1.0, "level": "info", "text": "x" * 1000})
    run.events.write_text(encode(step(7)) + "\n" + (filler + "\n") * 100 + '{"kind": "step", "tor')
    assert Tail.of(run).step == step(7)


def test_events_of_a_newer_trainer_and_garbage_are_skipped(tmp_path):
    run = RunLayout(tmp_path / "20200101-000000-aaaaaa")
    run.create()
    newer = encode(step(3)).replace('"epoch":0', '"epoch":0,"novelty":[1]')
    run.events.write_bytes(b'\xff\xfe\n{"kind": "from_the_future"}\nnull\n{"kind": 5}\n' + newer.encode() + b"\n\x00\n")
    assert Tail.of(run).step == step(3)
