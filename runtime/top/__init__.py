"""The live tree in a terminal: what the feed tells, kept and drawn.

Needs neither torch nor a server of its own process; `radixcache top` is its command.
"""
