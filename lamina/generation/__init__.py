"""Generation: prompts in, tokens out."""

from lamina.generation.chat import Chat
from lamina.generation.history import History, Processor
from lamina.generation.loop import generate, stream
from lamina.generation.prefixes import PrefixStore
from lamina.generation.prompt import Prompt
from lamina.generation.result import Result, Timing
from lamina.generation.settings import Settings
from lamina.generation.stream import Event, Stream

__all__ = [
    "Chat", "Event", "History", "PrefixStore", "Processor", "Prompt", "Result", "Settings", "Stream", "Timing",
    "generate", "stream",
]  # fmt: skip
