"""What is shown of the live tree: rows, samples and single nodes, as values.

Owns: reading them off the engine, keeping them, and who may see which.  Does not know: HTTP.
"""
