"""An OpenAI-compatible endpoint: one base model, and adapters that are picked by model name."""
