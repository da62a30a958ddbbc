"""What is measured of `primeblocks.fp8`, one question a file."""
