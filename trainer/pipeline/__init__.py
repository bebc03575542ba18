"""One process per GPU: layout, ring between targets and drafters, the loops of both roles."""
