"""What waits for a GPU, in four parts of at most eight minutes: see `run.sh`."""
