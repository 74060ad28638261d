"""The run folder and the object storage below it."""
