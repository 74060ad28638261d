"""What a run says about itself: event log, signs of life, progress on the console."""
