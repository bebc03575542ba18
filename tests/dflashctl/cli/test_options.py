"""How shared options become parameters of a verb, and the values that reach it."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from dflashctl.cli.help import LAST_RUN, VERBS, VerbCommand, main_help
from dflashctl.cli.options import Common, Interrupted, ReaderGone, add_parameters, command
from dflashctl.settings import SETTINGS


@dataclass(frozen=True)
class Colour:
    """A group of options as a verb might have one."""

    red: Annotated[int, typer.Option("--red")] = 1
    tags: Annotated[list[str] | None, typer.Option("--tag")] = None


def invoke(verb, *arguments):
    """Run a verb as `dflashctl` does."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command("verb", cls=VerbCommand)(verb)
    return typer.main.get_command(app).main(list(arguments), prog_name="dflashctl verb", standalone_mode=False)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def verb(calls):
    @command
    def painting(
        common: Common,
        colour: Colour,
        resume: Annotated[str, typer.Option("--resume")] = "",
        name: Annotated[str, typer.Option("--name")] = "",
        **more: str | None,
    ) -> int:
        """Paint."""
        calls.append((common, colour, resume, name, more))
        return len(calls)

    return painting


def test_groups_arrive_as_their_dataclasses(verb, calls):
    assert invoke(verb, "--red", "3", "--tag", "a", "--host", "h", "--tag", "b", "--json") == 1
    assert calls == [(Common(host="h", as_json=True), Colour(3, ["a", "b"]), "", "", {})]


def test_what_is_not_given_has_the_groups_defaults(verb, calls):
    invoke(verb)
    (common, colour, *_), *_ = calls
    assert colour.red == 1
    assert not colour.tags
    assert set(common.flags().values()) == {None}


def test_every_flag_of_common_that_is_a_setting_is_one():
    assert set(Common().flags()) <= set(SETTINGS)
    assert {field.name for field in dataclasses.fields(Common)} - set(Common().flags()) == {
        "as_json",
        "verbose",
        "debug",
    }


def test_the_signature_has_one_parameter_a_field_and_none_for_the_rest(verb):
    names = list(inspect.signature(verb).parameters)
    assert names == [*(field.name for field in dataclasses.fields(Common)), "red", "tags", "resume", "name"]
    assert verb.__doc__ == "Paint."


def test_further_parameters_reach_the_rest(verb, calls):
    annotation = Annotated[str | None, typer.Option("--depth")]
    add_parameters(
        verb, [inspect.Parameter("depth", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)]
    )
    invoke(verb, "--depth", "7")
    invoke(verb)
    assert [more for *_, more in calls] == [{"depth": "7"}, {"depth": None}]


@pytest.mark.parametrize(
    ("arguments", "resume", "name"),
    [
        (["--resume"], LAST_RUN, ""),
        (["--resume", "--name", "n"], LAST_RUN, "n"),
        (["--name", "n", "--resume"], LAST_RUN, "n"),
        (["--resume", "20260101-000000-abcdef@7"], "20260101-000000-abcdef@7", ""),
        (["--resume=20260101-000000-abcdef"], "20260101-000000-abcdef", ""),
        (["--name", "resume"], "", "resume"),
    ],
)
def test_resume_may_stand_without_a_value(verb, calls, arguments, resume, name):
    invoke(verb, *arguments)
    assert calls[0][2:4] == (resume, name)


def test_a_reader_who_has_gone_is_told_apart_from_other_failures():
    @command
    def talkative(common: Common) -> int:
        """Talk."""
        raise BrokenPipeError if common.as_json else OSError("disk")

    with pytest.raises(ReaderGone):
        invoke(talkative, "--json")
    with pytest.raises(OSError, match="disk"):
        invoke(talkative)


def test_ctrl_c_is_no_silent_end():
    @command
    def patient(common: Common) -> int:
        """Wait."""
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        invoke(patient)


def test_the_help_page_of_a_verb_has_its_own_options_first(verb, capsys):
    invoke(verb, "--help")
    page = capsys.readouterr().out
    assert page.index("Options:") < page.index("--red") < page.index("Where:") < page.index("--host")
    assert page.index("Where:") < page.index("Output:")
    assert "Paint." in page


def test_every_verb_has_a_module_a_group_and_one_line():
    assert len({verb.name for verb in VERBS}) == len(VERBS)
    for verb in VERBS:
        assert verb.help.endswith(".")
        assert len(verb.help) < 60
    assert max(map(len, main_help().splitlines())) <= 100
