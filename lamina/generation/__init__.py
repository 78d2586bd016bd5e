"""Generation: prompts, prefill, decoding strategies, stopping, streams, chats and prefix stores."""

from lamina.generation.chat import Chat
from lamina.generation.entry import generate, stream
from lamina.generation.prefix_store import PrefixStore
from lamina.generation.prompt import Prompt
from lamina.generation.result import Result, Timing
from lamina.generation.settings.settings import Settings
from lamina.generation.stream import Event, Stream
from lamina.sampling.history import History, Processor

__all__ = [
    "Chat", "Event", "History", "PrefixStore", "Processor", "Prompt", "Result", "Settings", "Stream", "Timing",
    "generate", "stream",
]  # fmt: skip
