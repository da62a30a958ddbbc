"""What `benchmarks.serving` measures, one question a file."""
