"""From a run folder to what people and scripts want to know about the run."""
