"""Reading a checkpoint and finding the parts of any Hugging Face decoder."""
