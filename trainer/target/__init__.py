"""The frozen target: loading it, capturing its hidden states, decoding with it."""
