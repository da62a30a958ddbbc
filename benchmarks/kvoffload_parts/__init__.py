"""What `benchmarks.kvoffload` measures, one question a file."""
