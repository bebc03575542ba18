"""Documents, the schedule that deals them out, and the verbs that make them: `prepare` and `generate`."""
