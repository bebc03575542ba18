"""What measuring needs and training does not: models and data of a real one's shape, drawn at random."""
