"""What `benchmarks.weightsync` measures, one question a file."""
