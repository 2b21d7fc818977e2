"""Decoding: batches of prompts, one streamed answer, a conversation."""

from leantune.generate.chat import ChatSession, run_chat
from leantune.generate.decode import generate, stream
from leantune.generate.sampling import Sampling

__all__ = ["ChatSession", "Sampling", "generate", "run_chat", "stream"]
