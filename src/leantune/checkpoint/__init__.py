"""What a run leaves on disk: resumable state, adapters, the run folder; and loading it for use."""
