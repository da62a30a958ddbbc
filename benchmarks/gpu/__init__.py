"""What needs a GPU, in one run of at most eight minutes: see `run.sh`."""
