"""Assembling a run, the loop, and what it reports. Calling the package is the verb `leantune.train`."""

import sys

from leantune.verbs import VerbPackage

sys.modules[__name__].__class__ = VerbPackage
