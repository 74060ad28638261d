"""What a user writes: one job, its fields, units, defaults and checks."""
