"""From a job to attempts on a cluster to a result."""
