"""Models: what a checkpoint says of itself, and the modules that compute it."""
