"""The DFlash drafter: configuration, blocks, attention, objective."""
