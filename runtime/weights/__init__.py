"""Model files: finding or fetching them, checking them, streaming their tensors."""
