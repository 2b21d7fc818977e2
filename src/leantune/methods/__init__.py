"""What is trained: one file a method, found by its name."""

from leantune.methods.protocol import AdapterFiles, Attached
from leantune.methods.registry import adapter_config_files, attach, attach_saved, method_names
from leantune.methods.together import join

__all__ = [
    "AdapterFiles",
    "Attached",
    "adapter_config_files",
    "attach",
    "attach_saved",
    "join",
    "method_names",
]
