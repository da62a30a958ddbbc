"""What `benchmarks.parallel` measures, one question a file."""
