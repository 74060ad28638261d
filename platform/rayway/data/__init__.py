"""Sharded Parquet as batches whose order depends on the job alone."""
