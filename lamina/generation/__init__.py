"""Generation: prompts, prefill, decoding strategies, stopping, streams, chats and prefix stores."""

from lamina.generation.chat import Chat
from lamina.generation.entry import generate, stream
from lamina.generation.prefill.score import Score
from lamina.generation.prefix_store import PrefixStore
from lamina.generation.prompt import Prompt
from lamina.generation.result import Result, Timing
from lamina.generation.settings.settings import Settings, register_setting, unregister_setting
from lamina.generation.stream import Event, Stream
from lamina.sampling.history import History, Processor
from lamina.sampling.setting import Setting

__all__ = [
    "Chat", "Event", "History", "PrefixStore", "Processor", "Prompt", "Result", "Score", "Setting", "Settings",
    "Stream", "Timing", "generate", "register_setting", "stream", "unregister_setting",
]  # fmt: skip
