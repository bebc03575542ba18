"""`python -m dflashctl`, for where the script is not on PATH."""

from dflashctl.cli import main

main()
