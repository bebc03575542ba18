"""Files of version 1, word for word: every later version has to open them. Do not regenerate these texts."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest

from remote.protocol import events as ev
from remote.protocol.records import (
    Alarm,
    ExitRecord,
    Lifecycle,
    RankError,
    RunSpec,
    RunState,
    RunStatus,
    StopRequest,
    read_record,
)

RUN_ID = "20261130-164227-0148ba"

SPEC = """{
 "run_id": "20261130-164227-0148ba",
 "argv": ["/usr/bin/python3", "-u", "-m", "trainer", "train", "--config-json", "/root/runs/20261130-164227-0148ba/config.json"],
 "environment": {"PATH": "/usr/local/bin:/usr/bin", "DFLASH_RUN_ID": "20261130-164227-0148ba"},
 "devices": ["0", "1"], "schema": 1, "release": "13a998f8e818", "name": "first", "note": "", "created": 1796056947.5,
 "by": "me@laptop", "host": "10.1.2.6", "ct": "200", "config": {"seed": 42, "target_gpus": [0]},
 "source": {"revision": "abc", "dirty": ""}, "packages": {"torch": "2.13.0"}, "resumed_from": "",
 "stop_grace": 120.0, "stall_timeout": 300.0, "kill_grace": 15.0, "gpu_memory": {"0": 4}
}"""

STATE = """{
 "run_id": "20261130-164227-0148ba", "state": "running", "since": 1796056948.0, "schema": 1,
 "boot_id": "d534eb6f-d255-4efc-97be-f695172c0c46", "supervisor_pid": 8760, "trainer_pid": 8765, "stop_by": "",
 "alarms": [{"kind": "non_finite", "message": "loss is NaN on drafter 1", "time": 1796056950.25, "step": 7}]
}"""

STOP = '{"deadline": 1796057000.0, "by": "me@laptop", "checkpoint": false, "schema": 1, "grace": 0}'

ERROR = """{
 "rank": 3, "role": "target", "device": "cuda:3", "phase": "warmup", "kind": "OutOfMemoryError",
 "message": "CUDA out of memory", "traceback": "Traceback ...", "time": 1796056949.0, "cause": "", "hint": "--split-fc off",
 "code": 1, "schema": 1
}"""

EXIT = """{
 "run_id": "20261130-164227-0148ba", "result": "failed", "ended": 1796056951.0, "by": "trainer", "schema": 1, "code": null,
 "signal": 9, "oom_kill": true, "last_step": 12, "last_checkpoint": "/c/step-00000010", "failed_rank": null,
 "message": "the leader was killed by signal 9", "traceback": ""
}"""

STATUS = """{
 "run_id": "20261130-164227-0148ba", "state": "running", "host": "local", "ct": "", "schema": 1, "name": "", "note": "",
 "release": "13a998f8e818", "created": 1796056947.5, "step": 12, "total_steps": 20, "loss": "NaN",
 "tokens_per_second": 1000, "phase": "training", "last_event": 1796056950.0, "resumed_from": "", "topology": "", "by": "",
 "last_checkpoint": "", "message": "", "failed_rank": null, "traceback": "", "run_dir": "/root/runs/x", "alarms": []
}"""

EVENTS = """\
{"kind":"run_started","time":1.5,"rank":-1,"run_id":"20261130-164227-0148ba",\
"topology":"1 target / 1 drafter","total_steps":20,"first_step":1,"resumed_from":""}
{"kind":"phase","time":2.0,"rank":1,"role":"target","phase":"loading","detail":"torch","seconds":0.25}
{"kind":"step","time":3.0,"rank":-1,"step":1,"total_steps":20,"epoch":0,"loss":"NaN","accuracy":0.5,\
"accept_len":1.25,"lr":0.0006,"grad_norm":"Infinity","tokens":4096,"tokens_per_second":14500.0,\
"eta_seconds":12.0,"applied":false}
{"kind":"stage_profile","time":4.0,"rank":0,"role":"drafter","device":"cuda:5","interval":60.0,"tokens":100,\
"stages":{"forward":1.5}}
{"kind":"checkpoint_saved","time":5.0,"rank":0,"step":1,"path":"/c/1","bytes":10,"seconds":0.5}
{"kind":"save_progress","time":5.5,"rank":0,"step":1,"written":5,"total":10}
{"kind":"alarm","time":6.0,"rank":0,"alarm":"stall","message":"no step for 300 s","step":1}
{"kind":"message","time":7.0,"rank":-1,"level":"info","text":"hello"}
{"kind":"run_finished","time":8.0,"rank":-1,"result":"finished","step":20,"checkpoint":"/c/20","seconds":9.5,\
"tokens":81920,"first_loss":11.9,"last_loss":2.5}
"""


def test_the_spec():
    spec = opened(RunSpec, SPEC)
    assert (spec.run_id, spec.devices, spec.ct, spec.gpu_memory) == (RUN_ID, ("0", "1"), "200", {"0": 4})
    assert spec.argv[-1].endswith("config.json")
    assert spec.config == {"seed": 42, "target_gpus": [0]}


def test_the_state():
    state = opened(RunState, STATE)
    assert state.alarms == (Alarm("non_finite", "loss is NaN on drafter 1", 1796056950.25, 7),)
    assert (state.state, state.trainer_pid) == (Lifecycle.RUNNING, 8765)


def test_stop_error_exit():
    stop, error, ended = opened(StopRequest, STOP), opened(RankError, ERROR), opened(ExitRecord, EXIT)
    assert (stop.checkpoint, stop.grace) == (False, 0.0)
    assert (error.rank, error.hint) == (3, "--split-fc off")
    assert (ended.code, ended.signal, ended.oom_kill, ended.failed_rank) == (None, 9, True, None)


def test_the_status():
    status = opened(RunStatus, STATUS)
    assert math.isnan(status.loss)
    assert status.tokens_per_second == 1000.0


@pytest.mark.parametrize(
    ("record", "text", "needed"),
    [
        (RunSpec, SPEC, {"run_id", "argv", "environment", "devices"}),
        (RunState, STATE, {"run_id", "state", "since"}),
        (StopRequest, STOP, {"deadline", "by"}),
        (ExitRecord, EXIT, {"run_id", "result", "ended", "by"}),
        (RunStatus, STATUS, {"run_id", "state"}),
    ],
)
def test_only_what_was_there_from_the_first_day_is_needed(record, text, needed):
    whole = json.loads(text)
    assert opened(record, json.dumps({key: whole[key] for key in needed}))
    for key in needed:
        with pytest.raises(ValueError):
            opened(record, json.dumps({other: whole[other] for other in needed - {key}}))


def test_the_events():
    events = list(ev.read_events(EVENTS.encode()))
    assert [event.kind for event in events] == [json.loads(line)["kind"] for line in EVENTS.splitlines()]
    step = events[2]
    assert isinstance(step, ev.Step)
    assert (math.isnan(step.loss), math.isinf(step.grad_norm), step.applied) == (True, True, False)
    since = {"pipeline_profile", "held_out", "warmed_up"}
    assert {event.kind for event in events} == ev.KINDS.keys() - since


def test_which_states_are_alive():
    alive = {state for state in Lifecycle if state.alive}
    assert alive == {Lifecycle.STARTING, Lifecycle.RUNNING, Lifecycle.STOPPING, Lifecycle.ORPHANED}


def opened(record, text: str):
    """Read a text as the file that it was."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        path.write_text(text, encoding="ascii")
        return read_record(record, path)
