"""From files of any common shape to encoded records, and from those to batches."""
