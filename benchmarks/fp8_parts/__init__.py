"""What `benchmarks.fp8` and a GPU measure of float8, one question a file."""
