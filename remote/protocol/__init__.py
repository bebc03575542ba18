"""What both ends agree on: frames, events and metrics, run records, run directory layout, codec."""
