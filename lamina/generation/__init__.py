"""Generation: prompts in, tokens out."""

from lamina.generation.loop import generate
from lamina.generation.prompt import Prompt
from lamina.generation.result import Result, Timing

__all__ = ["Prompt", "Result", "Timing", "generate"]
