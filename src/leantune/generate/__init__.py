"""Decoding: batched, streamed, and as a conversation. Calling the package is the verb `leantune.generate`."""

import sys

from leantune.verbs import VerbPackage

sys.modules[__name__].__class__ = VerbPackage
