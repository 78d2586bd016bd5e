"""How much fits: the bytes of weights, cache and passes, known before anything is loaded; `lamina.plan`."""

from lamina.planning.planner import Plan, Room, plan
from lamina.planning.sizes import parse_rate, parse_size

__all__ = ["Plan", "Room", "parse_rate", "parse_size", "plan"]
