"""The harness of the benchmarks: see docs/benchmarks.md."""
