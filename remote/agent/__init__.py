"""The far end: one verb per call, a supervisor per run. Standard library alone."""
