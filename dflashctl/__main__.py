"""`python -m dflashctl`, for where the script is not on PATH."""

import sys
from pathlib import Path

# `-m` looks in the working directory first: there, a project's own trainer/ would be taken for the one we belong to.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflashctl.cli import main

main()
