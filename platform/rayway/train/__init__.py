"""The training engine: one rank from a job and a run folder to committed weights."""
