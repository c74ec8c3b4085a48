"""That the cache is invisible, bit for bit: checked at the start, verified on demand.

Owns: what is promised and what was found.  Does not know: HTTP.  docs/exactness.md states the
promise.
"""
