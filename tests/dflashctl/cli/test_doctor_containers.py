"""`dflashctl doctor` through ssh and pct, against real containers where this machine can have them."""

from __future__ import annotations

import json

import pytest
from testbed.containers import VENV
from testbed.proxmox import HOST

HOPS = ["ssh", "host key", "pct", "container"]
BEHIND = ["python", "GPUs", "model", "memory", "data", "space", "round trip"]


@pytest.fixture
def look(cli, proxmox):
    """Return a function that runs doctor on a container and returns exit code and findings by name."""

    def doctor(ct: str, *more: str):
        way = ("--host", HOST, "--ct", ct, "--ssh-config", str(proxmox.ssh_config()), "--python", f"{VENV}/bin/python")
        done = cli("doctor", *way, "--json", *more)
        answer = json.loads(done.stdout)
        assert answer["code"] == done.returncode
        return done.returncode, {each["name"]: each for each in answer["findings"]}

    return doctor


@pytest.mark.parametrize("ct", ["200", "201"])
def test_all_lines_of_a_container(look, real_proxmox, ct):
    code, found = look(ct)
    assert list(found) == HOPS + BEHIND
    assert {found[name]["state"] for name in [*HOPS, "python", "memory", "space", "round trip"]} <= {"ok", "warning"}
    # The preset wants eight GPUs and a model in /dev/shm.
    failed = [name for name, each in found.items() if each["state"] == "failed"]
    assert (code, failed) == (7, ["GPUs", "model", "data"])
    assert "a container start empties /dev/shm" in found["model"]["hint"]
    assert "of 4.0 GiB (cgroup limit)" in found["memory"]["text"]
    assert "/dev/shm 2.0 GiB of 2.0 GiB free" in found["space"]["text"]
    assert "to connect before the first" in found["round trip"]["text"]


@pytest.mark.parametrize("ct", ["202", "203", "299", "777"])
def test_a_container_that_does_not_answer_ends_it_with_its_reason(look, ct):
    code, found = look(ct)
    assert code == 8
    last = list(found.values())[-1]
    assert (last["state"], last["code"], bool(last["hint"])) == ("failed", 8, True)
    assert list(found) == HOPS[: len(found)]


def test_a_host_key_that_changed_is_the_last_line(look, proxmox):
    proxmox.known_hosts.write_text("")
    code, found = look("200")
    assert (code, list(found)) == (8, ["host key"])
    assert "hosts trust" in found["host key"]["hint"]


def test_a_model_in_shared_memory_goes_with_a_restart(look, real_proxmox, cli, tmp_path):
    config = tmp_path / "own.toml"
    config.write_text('device = "cpu"\ntarget_model = "/dev/shm/target"\ndata_dir = "/workspace/none"\n')
    said = '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    script = (
        f"mkdir /dev/shm/target && cd /dev/shm/target && echo '{said}' > config.json && echo '{{}}' > tokenizer.json"
    )
    real_proxmox["200"].run("/bin/sh", "-c", script + r" && printf '\2\0\0\0\0\0\0\0{}' > model.safetensors")
    _, found = look("200", "--config", str(config))
    assert (found["model"]["state"], "gone after a container restart" in found["model"]["text"]) == ("ok", True)
    assert (found["GPUs"]["state"], found["data"]["state"]) == ("ok", "failed")
    real_proxmox["200"].restart()
    _, found = look("200", "--config", str(config))
    assert (found["model"]["state"], "copy the model there again" in found["model"]["hint"]) == ("failed", True)
