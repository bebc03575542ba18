"""`dflashctl doctor --host local` as a user runs it: a real agent, real releases, a terminal."""

from __future__ import annotations

import gzip
import json
import re
import sys

import pytest
from terminal import on_terminal

from remote.protocol.errors import ExitCode

LINES = ["machine", "python", "GPUs", "model", "memory", "data", "space", "round trip"]


@pytest.fixture
def place(cli, tmp_path):
    """Return a function that prepares this machine: a target, data, a tree with the stand-in trainer, and where runs live."""

    def make(tree) -> None:
        target = tmp_path / "target"
        target.mkdir()
        (target / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
        (target / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (target / "tokenizer.json").write_text("{}")
        (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(b'{"input_ids": [1], "labels": [1]}\n'))
        (tree / "templates/demo.toml").write_text(
            f'device = "cpu"\nring_mib = 8\ntarget_model = "{target}"\ndata_dir = "{tmp_path}/data.jsonl.gz"\n'
        )
        (cli.directory / "dflashctl.toml").write_text(f'source = "{tree}"\nroot = "{cli.root}"\n')

    return make


@pytest.fixture
def ready(cli, place, make_tree):
    """A destination where nothing lacks: its trainer is content with any configuration."""
    content = """print('{"documents": 1, "tokens": 20, "steps": 3, "drafter_parameters": 1000}')"""
    place(make_tree(trainer={"__init__.py": "", "__main__.py": content}))
    # The stand-in is no trainer that a selfcheck could train.
    assert cli("deploy", "--no-selfcheck").returncode == 0
    return cli


def names(out: str) -> list[str]:
    """The second column of plain lines; names may have two words."""
    lines = [line for line in out.splitlines() if not line.startswith(" ")]
    return [re.split(r"\s{2,}|(?<=^warning|^failed ) ", line[8:], maxsplit=1)[0].strip() for line in lines]


def test_where_nothing_lacks(ready):
    done = ready("doctor")
    assert (done.returncode, names(done.stdout)) == (0, LINES)
    assert {line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")} == {"ok"}
    assert "1 documents, 20 tokens, 3 steps" in " ".join(done.stdout.split())
    assert "demo.toml (preset)" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80 + len(str(ready.root))
    assert "\x1b" not in done.stdout


def test_one_call_and_four_for_the_round_trip(ready):
    done = ready("doctor", "-v")
    assert re.findall(r"agent\.pyz (\w+)", done.stderr) == ["doctor"] + ["releases"] * 4


def test_before_the_first_deploy_nothing_is_left_behind(cli, place, standin_tree):
    place(standin_tree())
    done = cli("doctor")
    assert (done.returncode, names(done.stdout)) == (0, LINES)
    assert "hint: run `dflashctl deploy` first" in done.stdout
    assert "the agent" in done.stdout
    assert not cli.root.exists()
    assert not cli.home.exists()


def test_a_configuration_of_ones_own_that_wants_what_is_not_there(ready, tmp_path):
    config = tmp_path / "own.toml"
    config.write_text('device = "cuda"\ntarget_model = "/dev/shm/no-such-model"\ndata_dir = "/nowhere/data"\n')
    done = ready("doctor", "--config", str(config), PATH="/nonexistent")
    assert done.returncode == ExitCode.PREFLIGHT
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("failed")]
    assert {"model", "data"} <= set(failed)
    assert "a container start empties /dev/shm" in " ".join(done.stdout.split())
    # Nothing of it is remembered: doctor looks, `start --config` decides.
    assert "own.toml" not in (ready.home / "destinations.json").read_text()


def test_what_the_preflight_refuses_decides_the_code(cli, place, standin_tree):
    said = {"error": "mask_token_id 99 lies outside", "cause": "it has 48 rows", "hint": "choose another", "code": 7}
    place(standin_tree(preflight=json.dumps(said)))
    assert cli("deploy", "--no-selfcheck").returncode == 0
    done = cli("doctor", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["code"]) == (7, 7)
    failed = [each for each in answer["findings"] if each["state"] == "failed"]
    assert failed == [
        {
            "name": "preflight",
            "state": "failed",
            "text": "mask_token_id 99 lies outside: it has 48 rows",
            "hint": "choose another",
            "code": 7,
        }
    ]


def test_as_json_stdout_is_one_object(ready):
    done = ready("doctor", "--json")
    answer = json.loads(done.stdout)
    assert [each["name"] for each in answer["findings"]] == LINES
    assert (done.returncode, answer["code"]) == (0, 0)
    assert answer["configuration"]["file"].endswith("demo.toml")


def test_a_python_that_is_none_is_told_as_the_agents_silence(ready):
    done = ready("doctor", "--python", "/nonexistent/python3")
    assert done.returncode == ExitCode.NO_ANSWER
    assert names(done.stdout) == ["machine", "agent"]
    assert "/nonexistent/python3" in done.stdout
    assert "--python" in done.stdout


def test_a_configuration_file_that_is_not_there(ready):
    done = ready("doctor", "--config", "/none.toml")
    assert done.returncode == ExitCode.USAGE
    assert names(done.stdout) == ["config", *LINES]


def test_a_source_tree_without_a_trainer_is_said(cli, place, make_tree):
    place(make_tree(trainer={"__init__.py": ""}))
    assert cli("deploy", "--no-selfcheck").returncode == 0
    done = cli("doctor")
    assert done.returncode == ExitCode.PREFLIGHT
    assert "the preflight failed" in done.stdout


@pytest.mark.parametrize("columns", [40, 80])
def test_on_a_terminal_there_are_signs_and_colours_and_lines_fit(ready, columns):
    environment = ready.environment(TERM="xterm", LANG="C.UTF-8", PYTHONIOENCODING="utf-8", LC_ALL="C.UTF-8")
    code, seen = on_terminal(ready.command("doctor"), environment, ready.directory, columns)
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", seen)
    assert [line[0] for line in plain.splitlines() if not line.startswith(" ")] == ["✓"] * len(LINES)
    assert "\x1b[32m✓" in seen
    # A path alone may be longer than a narrow terminal; nothing else is.
    assert [line for line in plain.splitlines() if len(line) > columns and len(line.split()) > 3] == []


def test_no_color_gives_words_on_a_terminal(ready):
    _, seen = on_terminal(ready.command("doctor"), ready.environment(TERM="xterm", NO_COLOR="1"), ready.directory)
    assert "\x1b" not in seen
    assert seen.startswith("ok      machine")


def test_a_reader_that_has_seen_enough_is_no_error(ready):
    import subprocess

    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m dflashctl doctor | head -1"],
        cwd=ready.directory, env=ready.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("ok      machine")
    assert "rror" not in done.stderr
