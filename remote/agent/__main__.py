"""`python -m remote.agent VERB`; agent.pyz carries the same two lines as its own __main__.py."""

from remote.agent.main import main

raise SystemExit(main())
