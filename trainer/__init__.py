"""The DFlash trainer: `python -m trainer VERB`."""
