"""What lives at the far end beside the trainer; standard library alone."""
