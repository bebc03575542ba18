"""`dflashctl start`: launch a run and return when its first step is trained."""

from __future__ import annotations

from dflashctl.cli.launchoptions import LaunchOptions
from dflashctl.cli.options import Common, add_parameters, command
from dflashctl.cli.trainingflags import training_parameters


@command
def verb(common: Common, options: LaunchOptions, **training_flags: str | None) -> int:
    """Start a run; return when its first step is trained.

    Every key of the training configuration is a flag. Without --config they change the configuration of the run that
    --resume goes on from, else the one used last at this destination, else a preset. The run goes on without this
    command: Ctrl-C only stops watching.
    """
    from dflashctl.agent_client import StartRequest
    from dflashctl.launch import carry_out, make_spec, read_resume
    from dflashctl.session import Session
    from dflashctl.shipping import tree_here
    from dflashctl.talk import Talk
    from dflashctl.training import resolve_training

    session = Session.open(common.flags() | options.flags(), verbose=common.verbose)
    # Before any contact: what is wrong with the command line is said first.
    typed = options.typed(training_flags)
    talk = Talk()
    resumed = read_resume(session, options.resume, talk) if options.resume else None
    base = resumed.spec if resumed is not None and options.config is None else None
    tree = tree_here(session) if options.deploy else session.deployed_source
    training = resolve_training(session.settings, session.remembered, tree, typed, base)
    session = options.prepared(session, training, talk)
    spec = make_spec(session, training, name=options.name or "", note=options.note)
    resume = "" if resumed is None else resumed.name
    limit = session.settings.seconds("limit")
    request = StartRequest(spec, limit, resume, options.wait_gpus, current=not options.deploy)
    remember = options.to_remember(training)
    return carry_out(session, request, talk, remember=remember, as_json=common.as_json, resumed=resumed)


add_parameters(verb, training_parameters())
