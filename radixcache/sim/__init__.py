"""Traces, and what a cache of another size or policy would have made of them.

Owns: the public names of the simulator.  Does not know: how it works.

trace = read_trace(Path("requests.jsonl.gz"), block_size=512)
simulate(trace, "lru", 10_000).outcome.hit_rate
lru_curve(trace).hit_rate(20_000)               # LRU at any size, without another replay
"""

from radixcache.sim.curve import HitCurve, lru_curve
from radixcache.sim.generate import KINDS, Agents, Chat, FewShot, Traffic, generate, traffic_of
from radixcache.sim.read import read_trace
from radixcache.sim.replay import Outcome, Replay, Speed
from radixcache.sim.roster import ROSTER, Row, simulate
from radixcache.sim.trace import Trace, TraceRequest

__all__ = [
    "KINDS",
    "ROSTER",
    "Agents",
    "Chat",
    "FewShot",
    "HitCurve",
    "Outcome",
    "Replay",
    "Row",
    "Speed",
    "Trace",
    "TraceRequest",
    "Traffic",
    "generate",
    "lru_curve",
    "read_trace",
    "simulate",
    "traffic_of",
]
